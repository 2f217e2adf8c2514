"""OpenAI's batch files over an application in this process: a line a request, a line an answer, no sockets."""
