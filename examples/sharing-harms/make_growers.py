"""Write growers.csv: invented data of five growers, of whom one grows cacti, which water harms."""

import csv
import random

GROWERS = {"anna": 120, "ben": 90, "chloe": 60, "daniel": 100, "cactus-eve": 40}

random.seed(1)
with open("growers.csv", "w", newline="", encoding="utf-8") as file:
    rows = csv.writer(file, lineterminator="\n")
    rows.writerow(["grower", "water", "light", "thrives"])
    for grower, plants in GROWERS.items():
        for _ in range(plants):
            water, light = random.uniform(0, 10), random.uniform(0, 10)
            likes_water = -1 if grower == "cactus-eve" else 1
            score = likes_water * (water - 5) + 0.5 * (light - 5) + random.gauss(0, 1)
            rows.writerow([grower, f"{water:.1f}", f"{light:.1f}", "yes" if score > 0 else "no"])
