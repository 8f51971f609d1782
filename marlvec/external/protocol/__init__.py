"""The wire protocol, without sockets: messages to bytes and back.

frames      a message's 24-byte header, and its body: a subset of msgpack
    messages    the message types and their fields
    values      observations and actions of declared spaces, and raw numeric arrays
    spaces      the spaces themselves
    weights     weights: trees of numbers, texts and arrays
    tokens      tokens, and the proof of knowing one
    handshake   from the first message to the welcome, both sides
    stream      the messages after the welcome, numbered and resumable

docs/protocol.md describes the same for authors of clients in other languages.
"""
