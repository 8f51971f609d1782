"""The parts of a client; its public class is `marlvec.external.Client`.

client            `Client`, the public class
connection        one connection: sends and receives messages
request_channel   numbered requests and their replies, across reconnections
env_form          agents and spaces as the server declared them; packs and unpacks their values
client_episodes   the client's side of its episodes
local_inference   settings with which a client runs policies itself; local_actor runs them, with fetched weights
"""
