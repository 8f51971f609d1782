"""A league in text: scripts, and a model that is only played here, meet in textarena's TicTacToe; who is best?

    python examples/league_text.py

`model` stands where a language model would be asked: it gets a prompt, and answers in words, wrongly at times. A
refused answer is a warning, the second one in a row loses. Needs the extra `textarena`.
"""

import argparse
import re

import marlvec
from marlvec.connectors import Template
from marlvec.selfplay import BradleyTerry, evaluate_match

parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
parser.add_argument("--seed", type=int, default=0, help="of the games and of what players draw")
parser.add_argument("--games", type=int, default=480, help="in all; a multiple of the 12 line-ups is best")
args = parser.parse_args()

GAME = "textarena/TicTacToe-v0"
LINES = ("012", "345", "678", "036", "147", "258", "048", "246")


def read(text: str) -> tuple[str, str, list[str]]:
    """The last board that a text shows, as 9 characters; the mark of who reads it; the free cells."""
    board = re.findall(r"[\dOX]", text.rsplit("Current Board:", 1)[-1].split("Available", 1)[0])[:9]
    return "".join(board), "O" if "You are Player 0" in text else "X", [cell for cell in board if cell.isdigit()]


def completes(board: str, mark: str, free: list[str]) -> list[str]:
    """The free cells that complete a line of this mark."""
    lines = [[cell for cell in line if board[int(cell)] != mark] for line in LINES]
    return [line[0] for line in lines if len(line) == 1 and line[0] in free]


def anywhere(text, agent, t, memory):
    """Play any free cell."""
    return f"[{memory.rng.choice(read(text)[2])}]"


def careful(text, agent, t, memory):
    """Win, or keep the other from it, or take the centre."""
    board, mark, free = read(text)
    best = completes(board, mark, free) or completes(board, "XO"[mark == "X"], free) or ["4"] * ("4" in free) or free
    return f"[{memory.rng.choice(best)}]"


def model(skill: float, slips: float) -> marlvec.ScriptedPolicy:
    """Stands for a language model: `ask` would send the prompt to a server, and wait for its answer."""

    def ask(prompt, agent, t, memory):
        board, mark, free = read(prompt)
        if memory.rng.random() < slips:
            return "I would rather talk about the weather."
        good = completes(board, mark, free) if memory.rng.random() < skill else []
        return f"One cell is best, I think: [{memory.rng.choice(good or free)}]"

    return marlvec.ScriptedPolicy(ask)


players = {
    "anywhere": marlvec.ScriptedPolicy(anywhere),
    "careful": marlvec.ScriptedPolicy(careful),
    "model": model(skill=0.9, slips=0.1),
    "sloppy model": model(skill=0.9, slips=0.4),
}
prompts = {name: [Template("<user>{obs}</user>")] for name in players if "model" in name}
result = evaluate_match(
    players, GAME, args.games, num_players=2, seed=args.seed, agent_connectors=prompts, backend="sync"
)
print(result)

ratings = result.rate(BradleyTerry())
for name in sorted(players, key=ratings.rating, reverse=True):
    low, high = ratings.interval(name)
    print(f"{name:<13} {ratings.rating(name):5.0f}  (95 %: {low:.0f} to {high:.0f})")
