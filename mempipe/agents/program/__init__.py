"""An agent that is any program: it asks the policy through the OpenAI API, and whatever contexts it makes are trained.

`agent` plays an attempt. `gateway` keeps the contexts of its requests, which `chat_completions` reads and `rendering`
turns into tokens, and the `memories` that they state; `responses` translates those of the responses API. `tool_calls`
reads the policy's calls. `endpoint` serves the gateway to a client in this process or at a port. `programs` runs the
two kinds of programs.
"""
