"""Worked answers, one module a notebook; ``lab.solution(id)`` prints them, and notebooks run on them meanwhile."""
