"""Looking at precision: what runs in which dtype, how far results move, and where infinities come from."""

from jamp.inspect._report import Report as Report
from jamp.inspect._report import report as report
