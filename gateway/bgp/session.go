package bgp

import (
	"fmt"
	"strings"
	"time"

	"github.com/isthmus-net/isthmus/gateway/desired"
)

// bfdTimeout is how long a peer that already has routes may wait for BFD to come up. Both sides start BFD with one packet
// a second (RFC 5880, 6.8.3).
const bfdTimeout = 15 * time.Second

// bfdWithoutSession is how long a session may be down before BFD starts without it. Routers in strict mode wait for BFD
// (draft-ietf-idr-bgp-bfd-strict-mode).
const bfdWithoutSession = 10 * time.Second

// restartFraction is the part of the graceful restart time, 1/2, for which a session may wait for BFD.
const restartFraction = 2

// session is the current state of the session with a peer.
type session struct {
	established bool
	unsynced    bool      // established, but gobgp does not send updates yet
	since       time.Time // time of the last change of established
	endReason   string    // why the last session ended or failed; "": none did
	families    [2]bool   // that the peer accepts: IPv4, IPv6

	bfd   desired.BFD // as running; noBFD: not running
	bfdUp bool        // both sides receive packets

	// announced says that the peer may receive our routes.
	announced bool
	// restarted says that the peer has the routes of our predecessor, and would remove them without news from us.
	restarted bool
	// bfdFirst says that the session starts only when BFD is up. The peer's BFD went down when the predecessor ended.
	// During graceful restart the peer ignores that (RFC 5882, 4.3.2), but afterwards it would end the new session.
	bfdFirst bool
	// flooded is the time when the session ended because the peer sent too many routes, and zero once it is up again.
	flooded time.Time
	// held says that bfdFirst or flooded delays the start, and addedHeld that it did when gobgp got the peer.
	held, addedHeld bool
}

// floodRest is how long a peer that sent too many routes has no session.
const floodRest = time.Minute

// noBFD is the configuration of a peer without BFD.
var noBFD desired.BFD

// update records that the session came up or went down.
func (s *session) update(established bool, families [2]bool, reason string, now time.Time) {
	if established == s.established {
		if reason != "" {
			s.endReason = reason
		}
		return
	}
	s.established, s.unsynced, s.since, s.families = established, established, now, families
	if established {
		s.endReason, s.flooded = "", time.Time{}
		return
	}
	s.endReason = reason
	s.announced, s.restarted, s.bfdUp = false, false, false
}

// mayAnnounce reports whether the peer n may receive our routes. Once it has them, only the end of the session changes
// that; BFD going down ends the session.
func (s *session) mayAnnounce(n neighbour, now time.Time) bool {
	switch {
	case n.bfd == noBFD:
		return true // as soon as the session is up
	case s.restarted && !s.established:
		return now.Sub(s.since) < n.restart // after that the peer has removed our routes
	case !s.established:
		return false
	case s.bfdUp:
		return true
	default:
		return s.announced && now.Sub(s.since) < bfdTimeout
	}
}

// wantsBFD reports whether BFD with n should run. Routers restart BFD with each session. gobgp must restart it too, or it
// takes their first packets for those of the old session.
func (s *session) wantsBFD(n neighbour, now time.Time) bool {
	return n.bfd != noBFD && (s.established || s.bfdFirst || now.Sub(s.since) >= bfdWithoutSession)
}

// mayBegin reports whether a held session may start.
func (s *session) mayBegin(n neighbour, now time.Time) bool {
	if !s.flooded.IsZero() {
		return now.Sub(s.flooded) >= floodRest
	}
	return s.bfdUp || n.bfd == noBFD || now.Sub(s.since) >= n.restart/restartFraction
}

// waits reports whether time alone may change the state.
func (s *session) waits(n neighbour) bool {
	return s.unsynced || s.restarted && !s.established || n.bfd != noBFD && !s.bfdUp
}

// setBFDUp records whether BFD is up. It counts only while BFD runs for the current session.
func (s *session) setBFDUp(up bool) { s.bfdUp = up && s.bfd != noBFD }

// endReasons translates gobgp's reasons for the end of a session. Unknown ones are passed on as they are.
var endReasons = map[string]string{
	"invalid-msg":        "it refuses this gateway: does it have this gateway as a neighbour, by this address and AS %d?",
	"bad-peer-as":        "its AS differs from the configured one",
	"hold-timer-expired": "its hold timer expired",
	"read-failed":        "it closed the connection",
	"write-failed":       "it closed the connection",
	"graceful-restart":   "it closed the connection, or restarts",
}

// downReason explains why there is no session with n, as far as that is known, to a speaker of AS asn.
func (s *session) downReason(n neighbour, asn uint32) string {
	port := n.port
	if port == 0 {
		port = 179
	}
	switch why, known := endReasons[s.endReason]; {
	case !s.flooded.IsZero():
		return fmt.Sprintf("no session: it sent more than %d routes of one address family, and this gateway uses none: filter them there, or raise maxPrefixes", n.most)
	case strings.Contains(why, "%d"):
		return "no session: " + fmt.Sprintf(why, asn)
	case known:
		return "no session: " + why
	case s.endReason != "":
		return "no session: " + s.endReason
	case n.password != "":
		return fmt.Sprintf("no session, and no answer on TCP port %d: is the password the same there, the port open, and this gateway its neighbour?", port)
	default:
		return fmt.Sprintf("no session, and no answer on TCP port %d: is the port open, this gateway its neighbour, and no password set there?", port)
	}
}
