"""Worked answers, one module a notebook. `lab.solution(id)` prints them; the notebooks run on them where a check has not passed."""
