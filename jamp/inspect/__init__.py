"""Looking at precision: what runs in which dtype, how far results move, and where infinities come from."""

from jamp.inspect._compare import Comparison as Comparison
from jamp.inspect._compare import Difference as Difference
from jamp.inspect._compare import compare as compare
from jamp.inspect._first_nonfinite import NonFinite as NonFinite
from jamp.inspect._first_nonfinite import first_nonfinite as first_nonfinite
from jamp.inspect._report import Report as Report
from jamp.inspect._report import report as report
