package desired

import (
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"
)

// communities are those with names that routers use: https://www.iana.org/assignments/bgp-well-known-communities
var communities = map[string]uint32{
	"graceful-shutdown":   0xffff0000, // RFC 8326
	"accept-own":          0xffff0001,
	"llgr-stale":          0xffff0006,
	"no-llgr":             0xffff0007,
	"blackhole":           0xffff029a,
	"no-export":           0xffffff01,
	"no-advertise":        0xffffff02,
	"no-export-subconfed": 0xffffff03,
	"no-peer":             0xffffff04,
}

// ParseCommunity parses a BGP community: a name, "65000:100" (RFC 1997) or "65000:1:2" (RFC 8092). It returns the one number of the
// former, or the three of a large one.
func ParseCommunity(text string) ([]uint32, error) {
	if value, ok := communities[text]; ok {
		return []uint32{value}, nil
	}
	parts := strings.Split(text, ":")
	bits := map[int]int{2: 16, 3: 32}[len(parts)]
	values := make([]uint32, len(parts))
	for i, part := range parts {
		n, err := strconv.ParseUint(part, 10, 32)
		if err != nil || bits == 0 || n>>bits > 0 {
			return nil, fmt.Errorf("is %q; it can be two numbers up to 65535 such as \"65000:100\", three up to 4294967295 such as \"65000:1:2\", or %s",
				text, strings.Join(slices.Sorted(maps.Keys(communities)), ", "))
		}
		values[i] = uint32(n)
	}
	if bits == 16 {
		return []uint32{values[0]<<16 | values[1]}, nil
	}
	return values, nil
}
