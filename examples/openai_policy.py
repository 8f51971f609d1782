"""A language model behind an OpenAI-compatible server (vLLM, llama.cpp, SGLang, OpenAI, ...) plays textarena.

    python examples/openai_policy.py --url http://localhost:8000/v1 --model my-model --game TicTacToe-v0

Each row is one request to ``/chat/completions``; 16 are under way at a time, and each game goes on as soon as its own
answer is there. Rows have the tokens' number and log-probability where the server gives them. The key is taken from
the environment variable OPENAI_API_KEY. Needs the extra `textarena`.
"""

import argparse
import json
import os
import urllib.request
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np

import marlvec
from marlvec.policies import AsyncPolicy

THREADS = ThreadPoolExecutor(64)  # they wait for replies, and compute nothing


class ChatPolicy(AsyncPolicy):
    """Sends the observation as a user's message; the action is the reply."""

    def __init__(self, url: str, model: str, *, max_tokens: int = 64, temperature: float = 1.0, **settings) -> None:
        super().__init__(**settings)
        self.url, self.fixed = f"{url}/chat/completions", {"model": model, "max_tokens": max_tokens, "logprobs": True}
        self.temperature = temperature

    def ask(self, row) -> Future:
        """Request a reply; return at once."""
        body = {
            **self.fixed,
            "messages": [{"role": "user", "content": row.obs}],
            "seed": row.seed,  # the same row gets the same reply, if the server heeds it
            "temperature": self.temperature if row.explore else 0.0,
        }
        return THREADS.submit(self._post, json.dumps(body).encode())

    def _post(self, body: bytes):
        headers = {
            "Content-Type": "application/json",
            "Authorization": f"Bearer {os.environ.get('OPENAI_API_KEY', '')}",
        }
        with urllib.request.urlopen(urllib.request.Request(self.url, body, headers), timeout=60) as reply:
            choice = json.load(reply)["choices"][0]
        tokens = (choice.get("logprobs") or {}).get("content") or []
        logp = float(sum(token["logprob"] for token in tokens)) if tokens else np.nan
        return choice["message"]["content"], {"logp": logp, "num_tokens": len(tokens)}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--url", default="http://localhost:8000/v1", help="of the server")
    parser.add_argument("--model", default="default", help="its name there")
    parser.add_argument("--game", default="TicTacToe-v0", help="one of textarena's, for two players")
    parser.add_argument("--games", type=int, default=16, help="in all")
    parser.add_argument("--envs", type=int, default=16, help="games at a time")
    args = parser.parse_args()

    envs = marlvec.make(f"textarena/{args.game}", num_envs=args.envs, num_players=2, history="train", backend="sync")
    # A request that fails is an empty answer: in textarena an invalid move, with a warning first.
    policy = ChatPolicy(args.url, args.model, answer_timeout=90.0, on_failure="fallback", fallback="")
    collector = marlvec.Collector(envs, policy, batch_mode="complete", overlap=True, seed=0)
    rows = collector.collect(episodes=args.games)["main"]
    print(f"{args.games} games, {len(rows)} answers, {policy.failures} failed, {rows.num_tokens.sum()} tokens")
    print(f"mean reward of the first player: {rows.rewards[rows.agent_index == 0].sum() / args.games:.2f}")
