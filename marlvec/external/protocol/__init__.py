"""The wire protocol, without sockets: messages to bytes and back. docs/protocol.md describes it for other languages."""
