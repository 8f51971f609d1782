"""Small games with the same numbers as PettingZoo's (boards, rock-paper-scissors) and OpenSpiel's rules (poker)."""
