from featherbed.kernels.bayes import choose_levels as choose_levels
from featherbed.kernels.bayes import solve_rows as solve_rows
from featherbed.kernels.ranking import draw_negatives as draw_negatives
from featherbed.kernels.ranking import ranking_pass as ranking_pass
from featherbed.kernels.threads import cores as cores
from featherbed.kernels.threads import run as run
from featherbed.kernels.threads import set_threads as set_threads
