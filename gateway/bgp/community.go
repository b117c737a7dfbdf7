package bgp

import (
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"
)

// largeCommunity is a community of RFC 8092.
type largeCommunity [3]uint32

// gracefulShutdown asks routers to prefer any other route (RFC 8326).
const gracefulShutdown = 0xffff0000

// wellKnown holds the communities with names that routers use:
// https://www.iana.org/assignments/bgp-well-known-communities
var wellKnown = map[string]uint32{
	"graceful-shutdown":   gracefulShutdown,
	"accept-own":          0xffff0001,
	"llgr-stale":          0xffff0006,
	"no-llgr":             0xffff0007,
	"blackhole":           0xffff029a,
	"no-export":           0xffffff01,
	"no-advertise":        0xffffff02,
	"no-export-subconfed": 0xffffff03,
	"no-peer":             0xffffff04,
}

// addCommunity adds a community in text form: a well-known name, "65000:100" or "65000:1:2".
func (a *attributes) addCommunity(text string) error {
	if value, ok := wellKnown[text]; ok {
		a.standard = append(a.standard, value)
		return nil
	}
	parts := strings.Split(text, ":")
	bits := map[int]int{2: 16, 3: 32}[len(parts)]
	values := make([]uint32, len(parts))
	for i, part := range parts {
		n, err := strconv.ParseUint(part, 10, 32)
		if err != nil || bits == 0 || n>>bits > 0 {
			return fmt.Errorf("is %q; it can be two numbers up to 65535 such as \"65000:100\", three up to 4294967295 such as \"65000:1:2\", or %s",
				text, strings.Join(slices.Sorted(maps.Keys(wellKnown)), ", "))
		}
		values[i] = uint32(n)
	}
	if bits == 16 {
		a.standard = append(a.standard, values[0]<<16|values[1])
	} else {
		a.large = append(a.large, largeCommunity(values))
	}
	return nil
}
