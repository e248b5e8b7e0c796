"""Drive the ranks of a data-parallel engine through random steps; every rank must enter the same collectives."""
