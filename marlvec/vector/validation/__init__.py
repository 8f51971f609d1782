"""Whether actions, observations and rewards are what their spaces say."""
