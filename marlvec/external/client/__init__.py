"""How a client works inside; `marlvec.external.Client` is what one sees of it.

link      one connection: messages out, messages in
caller    numbered requests and their replies, over connections that break and come back
form      what the server says of agents and spaces, and values of those
local     decides here, with weights that were fetched
"""
