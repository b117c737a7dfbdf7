package bgp

import "github.com/isthmus-net/isthmus/gateway/desired"

// largeCommunity is a community of RFC 8092.
type largeCommunity [3]uint32

// gracefulShutdown asks routers to prefer any other route (RFC 8326).
const gracefulShutdown = 0xffff0000

// addCommunity adds a community as desired.ParseCommunity takes it.
func (a *attributes) addCommunity(text string) error {
	values, err := desired.ParseCommunity(text)
	if err != nil {
		return err
	}
	if len(values) == 1 {
		a.standard = append(a.standard, values[0])
	} else {
		a.large = append(a.large, largeCommunity(values))
	}
	return nil
}
