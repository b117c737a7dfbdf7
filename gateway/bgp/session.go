package bgp

import (
	"fmt"
	"strings"
	"time"

	"github.com/isthmus-net/isthmus/gateway/desired"
)

// bfdPatience is how long a neighbour that was told before BFD was up may wait for it: BFD starts at one packet a
// second (RFC 5880, 6.8.3), on both sides.
const bfdTimeout = 15 * time.Second

// bfdAlone is after which time without a session BFD begins by itself. Some routers are in a strict mode and wait for it
// (draft-ietf-idr-bgp-bfd-strict-mode).
const bfdWithoutSession = 10 * time.Second

// heldBack is for which part of the time that a neighbour remembers our process's predecessor its session may wait for BFD.
const restartFraction = 2

// session is what is known of a neighbour now.
type session struct {
	established bool
	unsynced    bool      // established, but gobgp does not send yet what it is asked to
	since       time.Time // when established became what it is
	endReason   string    // why the last one ended, or did not come about; "": none did
	families    [2]bool   // what the neighbour takes: IPv4, IPv6

	bfd   desired.BFD // as it runs; noBFD: it does not
	bfdUp bool        // both hear each other

	// told says that the neighbour may be told our routes.
	announced bool
	// restarted says that it was told by our process's predecessor, and would forget when we are silent.
	restarted bool
	// bfdFirst says that the session begins when BFD is up. The neighbour's BFD goes down when it misses the predecessor: in
	// graceful restart it lets that pass (RFC 5882, 4.3.2), but would end the successor's session for it.
	bfdFirst bool
	// held says that bfdFirst keeps it from beginning.
	held bool
}

// noBFD is what a neighbour without BFD has.
var noBFD desired.BFD

// change is an end or a beginning of a session.
func (s *session) update(established bool, families [2]bool, reason string, now time.Time) {
	if established == s.established {
		if reason != "" {
			s.endReason = reason
		}
		return
	}
	s.established, s.unsynced, s.since, s.families = established, established, now, families
	if established {
		s.endReason = ""
		return
	}
	s.endReason = reason
	s.announced, s.restarted, s.bfdUp = false, false, false
}

// mayBeTold reports whether the neighbour n may be told our routes. Once it was, only the end of its session changes
// that: BFD going down ends it.
func (s *session) mayAnnounce(n neighbour, now time.Time) bool {
	switch {
	case n.bfd == noBFD:
		return true // as soon as there is a session
	case s.restarted && !s.established:
		return now.Sub(s.since) < n.restart // then nobody remembers us
	case !s.established:
		return false
	case s.bfdUp:
		return true
	default:
		return s.announced && now.Sub(s.since) < bfdTimeout
	}
}

// wantsBFD reports whether we should send to n. Routers begin BFD anew with each session, and gobgp takes the first
// packets for those of the old one unless it begins anew, too.
func (s *session) wantsBFD(n neighbour, now time.Time) bool {
	return n.bfd != noBFD && (s.established || s.bfdFirst || now.Sub(s.since) >= bfdWithoutSession)
}

// mayBegin reports whether a session that is held may begin.
func (s *session) mayBegin(n neighbour, now time.Time) bool {
	return s.bfdUp || n.bfd == noBFD || now.Sub(s.since) >= n.restart/restartFraction
}

// waits reports whether time alone may change something.
func (s *session) waits(n neighbour) bool {
	return s.unsynced || s.restarted && !s.established || n.bfd != noBFD && !s.bfdUp
}

// setBFDUp notes whether BFD is up. It counts while there is a session: in between, it is about the one before.
func (s *session) setBFDUp(up bool) { s.bfdUp = up && s.bfd != noBFD }

// reasons are what gobgp's words for the end of a session mean. Others are put as they are.
var endReasons = map[string]string{
	"invalid-msg":        "it refuses us: does it know this gateway by this address, and by AS %d?",
	"bad-peer-as":        "it is of another AS than the state says",
	"hold-timer-expired": "it fell silent",
	"read-failed":        "it closed the connection",
	"write-failed":       "it closed the connection",
	"graceful-restart":   "it closed the connection, or restarts",
}

// absence tells why there is no session with n, as far as that is known, to a speaker of AS asn.
func (s *session) downReason(n neighbour, asn uint32) string {
	port := n.port
	if port == 0 {
		port = 179
	}
	switch why, known := endReasons[s.endReason]; {
	case strings.Contains(why, "%d"):
		return "no session: " + fmt.Sprintf(why, asn)
	case known:
		return "no session: " + why
	case s.endReason != "":
		return "no session: " + s.endReason
	case n.password != "":
		return fmt.Sprintf("no session, and no answer at TCP port %d: is the password the same there, the port open, and this gateway its neighbour?", port)
	default:
		return fmt.Sprintf("no session, and no answer at TCP port %d: is the port open, this gateway its neighbour, and no password set there?", port)
	}
}
