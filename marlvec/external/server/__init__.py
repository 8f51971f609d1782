"""How a server works inside: one thread and its sockets; `marlvec.external.Server` is what one sees of it.

binding      the address, and who may be let in there
gate         which WebSocket requests are let in
connection   one client's socket: bytes in, whole messages out, and the other way round
session      one client's requests, and the episodes they belong to; outlives its connections
weights      what policies have learned, in numbered versions
house        all connections and sessions, and what is due when
loop         the thread
"""
