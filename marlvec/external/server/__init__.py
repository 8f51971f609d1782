"""The parts of a server, which has one thread; its public class is `marlvec.external.Server`.

server            `Server`, the public class
request_filter    which WebSocket requests are accepted
connection        one client's socket: bytes to whole messages and back
value_readers     reads and writes values by the declared spaces
session           one client's requests and episodes; outlives its connections
slot_queue        which client gets the next free slot
weight_store      policies' weights, in numbered versions
session_manager   all connections and sessions, and their deadlines
socket_loop       the thread, and its listening socket
"""
