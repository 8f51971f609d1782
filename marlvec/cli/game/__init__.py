"""Games of a person: display of boards, and input of moves."""
