"""The fixed canary probes: short exchanges whose log-probabilities show what the served stack computes.

They never change within a version of this program: the trainer predicts their log-probabilities, the server computes
them, and the gate compares the two. ASCII and multibyte, prose, a list, digits and code, so that tokens of many kinds
are covered.
"""

from __future__ import annotations

from engine.protocol import ProbeText

PROBES = (
    ProbeText(user="What colour is the sky on a clear day?", assistant="On a clear day the sky is blue."),
    ProbeText(user="Name three fruits.", assistant="Apple, banana and cherry."),
    ProbeText(user="How many days has a week?", assistant="A week has 7 days."),
    ProbeText(user="Say good morning in French.", assistant="Bonjour ! Ça va ?"),
    ProbeText(user="Write a line of Python that prints 42.", assistant="print(42)"),
    ProbeText(user="Is water wet?", assistant="Yes, most people would say that water is wet."),
    ProbeText(user="Give me a short list for the shop.", assistant="- milk\n- bread\n- eggs"),
    ProbeText(user="Where is Tokyo?", assistant="Tokyo (東京) is the capital of Japan."),
)

# What the base is asked to see how far the engines round apart: prose, lists, figures, code and other languages.
CALIBRATION_PROMPTS = (
    *(probe.user for probe in PROBES),
    "What does a lighthouse do?",
    "Tell me about the city of Zürich.",
    "Count from one to ten in Spanish.",
    "Explain to a child why leaves fall in autumn.",
    "Write a function that adds two numbers.",
    "Which is larger, 17 or 71, and why?",
    "List the months that have 30 days.",
    "How do you say thank you in Japanese?",
)
