"""Wrong answers, each with a part of the hint it must get ("" where none fits)."""
