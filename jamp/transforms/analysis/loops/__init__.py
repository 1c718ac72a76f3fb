"""What carries of loops are: what adds up, what decides, what ends early, what a loop starts from."""
