"""How a server works inside: one thread and its sockets; `marlvec.external.Server` is what one sees of it.

server            `Server`, the public class
request_filter    which WebSocket requests are let in
connection        one client's socket: bytes in, whole messages out, and the other way round
value_readers     what a client says, read as the declared spaces say
session           one client's requests, and the episodes they belong to; outlives its connections
slot_queue        whose turn it is to get a slot
weight_store      what policies have learned, in numbered versions
session_manager   all connections and sessions, and what is due when
socket_loop       the thread, and the address it listens at
"""
