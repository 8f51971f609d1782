"""Settings of all scripts of this folder: near those of ``examples/ppo_simple_spread.py``, tuned for none of them."""

NUM_ENVS, STEPS = 128, 25  # simple_spread's episodes have 25 steps: an update learns from one episode of each env
AGENTS = 3
BATCH, ROWS = NUM_ENVS * STEPS, NUM_ENVS * STEPS * AGENTS  # env steps and rows of an update
EPOCHS, MINIBATCH = 8, 2_400  # rows
HIDDEN = [128, 128]  # tanh, of actor and critic, which share nothing
LEARNING_RATE, MAX_GRAD_NORM = 3e-3, 0.5  # Adam
GAMMA, LAMBDA, CLIP, ENTROPY, VALUE = 0.9, 0.95, 0.2, 0.003, 0.5
