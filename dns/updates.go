package dns

import "time"

// UpdateBuckets holds the upper bounds of Updates.Buckets, in seconds.
var UpdateBuckets = [...]float64{.0005, .001, .0025, .005, .01, .025, .05, .1, .25, 1}

// Updates is a histogram of the time from a changed snapshot to answers from it.
type Updates struct {
	Count   uint64
	Sum     float64                    // seconds
	Buckets [len(UpdateBuckets)]uint64 // updates no longer than each bound; cumulative
}

func (u *Updates) observe(d time.Duration) {
	u.Count++
	u.Sum += d.Seconds()
	for i, bound := range UpdateBuckets {
		if d.Seconds() <= bound {
			u.Buckets[i]++
		}
	}
}
