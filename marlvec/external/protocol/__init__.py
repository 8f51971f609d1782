"""What goes over a socket, and nothing of sockets: bytes in, messages out, and the other way round.

    frames      a message's first 24 bytes
    codec       its body: msgpack, and only what we use of it
    schema      which messages there are, and what each may hold
    arrays      raw numeric arrays
    values      observations and actions, as the declared spaces say
    spaces      the spaces themselves
    plain       weights: trees of numbers, texts and arrays
    keys        tokens, and proofs of knowing one
    handshake   from the first message to the welcome, both sides
    session     what may follow, numbered and resumable

docs/external.md is the same for those who write a client in another language.
"""
