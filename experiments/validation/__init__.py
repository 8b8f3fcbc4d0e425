"""What is predicted against what compilers make of it and what devices measure; and whether the numbers agree."""
