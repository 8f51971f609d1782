"""How a client works inside; `marlvec.external.Client` is what one sees of it.

client            `Client`, the public class
connection        one connection: messages out, messages in
request_channel   numbered requests and their replies, over connections that break and come back
env_form          what the server says of agents and spaces, and values of those
client_episodes   the client's side of its episodes
local_inference   how a client decides for itself; local_actor does it, with weights that were fetched
"""
