"""The serve role: prompts in, sampled tokens and their log-probabilities out, adapters swapped under running requests.

    worker      the loop            asking, answering   requests    staging   adapters
    scheduler   which tokens next   swap        which adapter where  sampling, text, answer   one token to its records
    backend     what an engine gives                          decoder     a context and its scheduler
    llamacpp    the C library       prove   canaries and fluency

`scheduler`, `cells`, `swap`, `sampling`, `text`, `answer` and `template` are pure; only `llamacpp` touches the library,
and everything else meets it through `backend`.
"""
