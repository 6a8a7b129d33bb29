from zeropp.capabilities.experts.exchange import combine as combine
from zeropp.capabilities.experts.exchange import dispatch as dispatch
from zeropp.capabilities.experts.rows import RowsOfPairs as RowsOfPairs
from zeropp.capabilities.experts.rows import RowsOfSomePairs as RowsOfSomePairs
from zeropp.capabilities.experts.rows import RowsOfTokens as RowsOfTokens
from zeropp.capabilities.experts.rows import WeightedSums as WeightedSums
