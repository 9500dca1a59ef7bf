"""The serve role on a server elsewhere: vLLM or SGLang decodes, batches and samples, and this worker speaks for it.

    worker      the loop              answering   requests, a stream each       staging   adapters on the server
    server      what a server does    vllm, sglang   the two of them            transport   HTTP
    meaning     what its log-probabilities are of (pure)                        mailbox   from threads to the loop

Prompts are made and answers are read here, as tokens: the server is given token ids and asked for token ids, so nothing
is ever tokenised twice, and stop strings, texts and records are made by the same code as for an engine in this process.
"""
