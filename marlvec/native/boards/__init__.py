"""PettingZoo's small classic games, with the same numbers: tic-tac-toe, connect four, rock-paper-scissors."""
