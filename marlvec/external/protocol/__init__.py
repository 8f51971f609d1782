"""What goes over a socket, and nothing of sockets: bytes in, messages out, and the other way round.

    frames      a message's first 24 bytes, and its body: msgpack, and only what we use of it
    messages    which messages there are, and what each may hold
    values      observations and actions, as the declared spaces say, and raw numeric arrays
    spaces      the spaces themselves
    weights     weights: trees of numbers, texts and arrays
    tokens      tokens, and proofs of knowing one
    handshake   from the first message to the welcome, both sides
    stream      what may follow, numbered and resumable

docs/protocol.md is the same for those who write a client in another language.
"""
