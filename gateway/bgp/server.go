package bgp

import (
	"context"
	"fmt"
	"log/slog"
	"maps"
	"math"
	"net/netip"
	"slices"
	"sync/atomic"
	"time"

	"github.com/osrg/gobgp/v4/api"
	"github.com/osrg/gobgp/v4/pkg/apiutil"
	packet "github.com/osrg/gobgp/v4/pkg/packet/bgp"
	"github.com/osrg/gobgp/v4/pkg/server"
)

// Indices of address families outside this file.
const (
	ipv4 = iota
	ipv6
)

var families = [2]packet.Family{ipv4: packet.RF_IPv4_UC, ipv6: packet.RF_IPv6_UC}

func family(a netip.Addr) int {
	if a.Is4() {
		return ipv4
	}
	return ipv6
}

// bgpServer is a running gobgp. Its types stay in this file.
type bgpServer struct {
	s      *server.BgpServer
	silent *atomic.Bool // suppresses the errors of an intended stop
	// add is s.AddPeer; tests replace it.
	add func(context.Context, *api.AddPeerRequest) error
}

// event is a change of a session.
type event struct {
	peer        netip.Addr
	established bool
	families    [2]bool
	reason      string // why the session is not established
	flooded     bool   // it was ended because the peer sent too many routes
}

// startServer starts gobgp, which dials and does not listen. It calls onEvent for one event at a time until ctx ends.
func startServer(ctx context.Context, id identity, log *slog.Logger, onEvent func(event)) (*bgpServer, error) {
	silent := new(atomic.Bool)
	s := server.NewBgpServer(server.LoggerOption(slog.New(errorHandler{log.Handler(), silent}), new(slog.LevelVar)))
	go s.Serve()
	g := &bgpServer{s: s, silent: silent, add: s.AddPeer}
	if err := s.StartBgp(ctx, &api.StartBgpRequest{Global: &api.Global{Asn: id.asn, RouterId: id.routerID.String(), ListenPort: -1}}); err != nil {
		s.Stop()
		return nil, fmt.Errorf("start the speaker: %w", err)
	}
	if err := g.watch(ctx, onEvent); err != nil {
		s.Stop()
		return nil, err
	}
	if err := g.restrict(ctx); err != nil {
		s.Stop()
		return nil, err
	}
	return g, nil
}

// errorHandler passes only errors on, or nothing when silent. All other changes arrive as events.
type errorHandler struct {
	slog.Handler
	silent *atomic.Bool
}

func (q errorHandler) Enabled(ctx context.Context, l slog.Level) bool {
	return l >= slog.LevelError && !q.silent.Load() && q.Handler.Enabled(ctx, l)
}

func (q errorHandler) WithAttrs(a []slog.Attr) slog.Handler {
	return errorHandler{q.Handler.WithAttrs(a), q.silent}
}

func (q errorHandler) WithGroup(name string) slog.Handler {
	return errorHandler{q.Handler.WithGroup(name), q.silent}
}

func (g *bgpServer) watch(ctx context.Context, onEvent func(event)) error {
	err := g.s.WatchEvent(ctx, server.WatchEventMessageCallbacks{
		OnPeerUpdate: func(e *apiutil.WatchEventMessage_PeerEvent, _ time.Time) {
			if e.Type != apiutil.PEER_EVENT_STATE {
				return
			}
			state := e.Peer.State
			ev := event{peer: state.NeighborAddress, established: state.SessionState == packet.BGP_FSM_ESTABLISHED}
			ev.flooded = state.AdminState == api.PeerState_ADMIN_STATE_PFX_CT
			// Only a session that ended has a reason. The steps of a session that starts also set one.
			switch state.DisconnectReason {
			case api.PeerState_DISCONNECT_REASON_UNSPECIFIED, api.PeerState_DISCONNECT_REASON_IDLE_TIMER_EXPIRED:
			default:
				ev.reason = state.DisconnectMessage
			}
			for _, c := range state.RemoteCap {
				if mp, ok := c.(*packet.CapMultiProtocol); ok {
					for i, f := range families {
						ev.families[i] = ev.families[i] || mp.CapValue == f
					}
				}
			}
			onEvent(ev)
		},
	}, server.WatchPeer())
	if err != nil {
		return fmt.Errorf("watch sessions: %w", err)
	}
	return nil
}

// stop ends all sessions. With restart, peers only see the connection close, and keep routes if graceful restart is on.
func (g *bgpServer) stop(ctx context.Context, restart bool) error {
	if err := g.s.StopBgp(ctx, &api.StopBgpRequest{AllowGracefulRestart: restart}); err != nil {
		return fmt.Errorf("stop the speaker: %w", err)
	}
	g.silent.Store(true) // gobgp's Stop, which ends BFD, stops BGP again
	g.s.Stop()
	return nil
}

// Names of the policies.
const (
	imports = "import"
	exports = "export"
)

// restrict makes the server accept no route from peers, and export none until export is called.
func (g *bgpServer) restrict(ctx context.Context) error {
	if err := g.setPolicies(ctx, nil); err != nil {
		return err
	}
	// A default that rejects imports would also drop our own routes.
	for _, a := range []*api.PolicyAssignment{
		{Name: "global", Direction: api.PolicyDirection_POLICY_DIRECTION_IMPORT, Policies: []*api.Policy{{Name: imports}}, DefaultAction: api.RouteAction_ROUTE_ACTION_ACCEPT},
		{Name: "global", Direction: api.PolicyDirection_POLICY_DIRECTION_EXPORT, Policies: []*api.Policy{{Name: exports}}, DefaultAction: api.RouteAction_ROUTE_ACTION_REJECT},
	} {
		if err := g.s.SetPolicyAssignment(ctx, &api.SetPolicyAssignmentRequest{Assignment: a}); err != nil {
			return fmt.Errorf("set the %s policy: %w", a.Policies[0].Name, err)
		}
	}
	return nil
}

// export is what a peer receives.
type export struct {
	nextHops [2]netip.Addr // of routes by family; not valid: it receives none
	withheld []netip.Addr  // VIPs whose routes it does not receive, sorted
}

func (e export) equal(o export) bool {
	return e.nextHops == o.nextHops && slices.Equal(e.withheld, o.withheld)
}

// export exports our routes to these peers, and to no other. It sends all routes again to the peers in changed, and withdraws those
// that they no longer receive.
func (g *bgpServer) export(ctx context.Context, exports map[netip.Addr]export, changed []netip.Addr) error {
	if err := g.setPolicies(ctx, exports); err != nil {
		return err
	}
	for _, a := range changed {
		err := g.s.ResetPeer(ctx, &api.ResetPeerRequest{Address: a.String(), Soft: true, Direction: api.ResetPeerRequest_DIRECTION_OUT})
		if err != nil {
			return fmt.Errorf("export to peer %s: %w", a, err)
		}
	}
	return nil
}

func (g *bgpServer) setPolicies(ctx context.Context, all map[netip.Addr]export) error {
	in, out := &api.Policy{Name: imports}, &api.Policy{Name: exports}
	for name, kind := range map[string]api.Conditions_RouteType{"internal": api.Conditions_ROUTE_TYPE_INTERNAL, "external": api.Conditions_ROUTE_TYPE_EXTERNAL} {
		in.Statements = append(in.Statements, &api.Statement{
			Name: name, Conditions: &api.Conditions{RouteType: kind}, Actions: &api.Actions{RouteAction: api.RouteAction_ROUTE_ACTION_REJECT},
		})
	}
	var sets []*api.DefinedSet
	for a, e := range all {
		sets = append(sets, &api.DefinedSet{
			DefinedType: api.DefinedType_DEFINED_TYPE_NEIGHBOR, Name: a.String(), List: []string{netip.PrefixFrom(a, a.BitLen()).String()},
		})
		for i, hop := range e.nextHops {
			if !hop.IsValid() {
				continue
			}
			to := func(verb string) *api.Statement {
				return &api.Statement{
					Name: fmt.Sprintf("%s %s to %s", verb, families[i], a),
					Conditions: &api.Conditions{
						NeighborSet: &api.MatchSet{Type: api.MatchSet_TYPE_ANY, Name: a.String()},
						AfiSafiIn:   []*api.Family{apiFamily(i)},
						RouteType:   api.Conditions_ROUTE_TYPE_LOCAL,
					},
				}
			}
			if withheld := hostPrefixes(e.withheld, i); len(withheld) > 0 {
				s := to("withhold")
				sets = append(sets, &api.DefinedSet{DefinedType: api.DefinedType_DEFINED_TYPE_PREFIX, Name: s.Name, Prefixes: withheld})
				s.Conditions.PrefixSet = &api.MatchSet{Type: api.MatchSet_TYPE_ANY, Name: s.Name}
				s.Actions = &api.Actions{RouteAction: api.RouteAction_ROUTE_ACTION_REJECT}
				out.Statements = append(out.Statements, s)
			}
			s := to("send")
			s.Actions = &api.Actions{RouteAction: api.RouteAction_ROUTE_ACTION_ACCEPT, Nexthop: &api.NexthopAction{Address: hop.String()}}
			out.Statements = append(out.Statements, s)
		}
	}
	if err := g.s.SetPolicies(ctx, &api.SetPoliciesRequest{DefinedSets: sets, Policies: []*api.Policy{in, out}}); err != nil {
		return fmt.Errorf("set the export policy: %w", err)
	}
	return nil
}

// hostPrefixes returns the networks of the addresses of a family.
func hostPrefixes(all []netip.Addr, fam int) (prefixes []*api.Prefix) {
	for _, a := range all {
		if family(a) == fam {
			bits := uint32(a.BitLen())
			prefixes = append(prefixes, &api.Prefix{IpPrefix: netip.PrefixFrom(a, a.BitLen()).String(), MaskLengthMin: bits, MaskLengthMax: bits})
		}
	}
	return prefixes
}

func apiFamily(i int) *api.Family {
	return &api.Family{Afi: api.Family_Afi(families[i].Afi()), Safi: api.Family_Safi(families[i].Safi())}
}

// addPeer adds a peer and starts its session, unless held: then beginSession starts it. With restarting, the peer learns
// that it may keep the routes that it has from this gateway.
func (g *bgpServer) addPeer(ctx context.Context, a netip.Addr, n neighbour, restarting, held bool) error {
	p := apiPeer(a, n, false, held)
	if p.GracefulRestart != nil {
		p.GracefulRestart.LocalRestarting = restarting
	}
	if err := g.add(ctx, &api.AddPeerRequest{Peer: p}); err != nil {
		return fmt.Errorf("add peer %s: %w", a, err)
	}
	return nil
}

// beginSession starts a held session.
func (g *bgpServer) beginSession(ctx context.Context, a netip.Addr) error {
	if err := g.s.EnablePeer(ctx, &api.EnablePeerRequest{Address: a.String()}); err != nil {
		return fmt.Errorf("start the session with peer %s: %w", a, err)
	}
	return nil
}

// setBFD starts or stops BFD with a peer. wasHeld must be what addPeer was given, or the session restarts.
func (g *bgpServer) setBFD(ctx context.Context, a netip.Addr, n neighbour, on, wasHeld bool) error {
	if _, err := g.s.UpdatePeer(ctx, &api.UpdatePeerRequest{Peer: apiPeer(a, n, on, wasHeld)}); err != nil {
		return fmt.Errorf("change BFD with peer %s: %w", a, err)
	}
	return nil
}

func (g *bgpServer) deletePeer(ctx context.Context, a netip.Addr) error {
	if err := g.s.DeletePeer(ctx, &api.DeletePeerRequest{Address: a.String()}); err != nil {
		return fmt.Errorf("remove peer %s: %w", a, err)
	}
	return nil
}

// deferral is how many seconds a restarting speaker waits for the routes of its peers. It needs none of them, but 0 means
// minutes.
const deferral = 1

func apiPeer(a netip.Addr, n neighbour, bfd, held bool) *api.Peer {
	hold := uint64(n.hold.Seconds())
	p := &api.Peer{
		Conf:      &api.PeerConf{NeighborAddress: a.String(), PeerAsn: n.asn, AuthPassword: n.password, AdminDown: held},
		Transport: &api.Transport{RemotePort: uint32(n.port)},
		Timers:    &api.Timers{Config: &api.TimersConfig{HoldTime: hold, KeepaliveInterval: hold / 3, ConnectRetry: 1, IdleHoldTimeAfterReset: 1}},
	}
	if n.hops > 0 {
		p.TtlSecurity = &api.TtlSecurity{Enabled: true, TtlMin: math.MaxUint8 + 1 - uint32(n.hops)}
	}
	for i := range families {
		f := &api.AfiSafi{
			Config:       &api.AfiSafiConfig{Family: apiFamily(i), Enabled: true},
			PrefixLimits: &api.PrefixLimit{Family: apiFamily(i), MaxPrefixes: n.most},
		}
		if n.restart > 0 {
			f.MpGracefulRestart = &api.MpGracefulRestart{Config: &api.MpGracefulRestartConfig{Enabled: true}}
		}
		p.AfiSafis = append(p.AfiSafis, f)
	}
	if n.restart > 0 {
		p.GracefulRestart = &api.GracefulRestart{Enabled: true, RestartTime: uint32(n.restart.Seconds()), DeferralTime: deferral}
	}
	if bfd {
		micros := n.bfd.IntervalMillis * 1000
		p.Bfd = &api.BfdPeerConfig{
			Enabled: true, DesiredMinimumTxInterval: micros, RequiredMinimumReceive: micros, DetectionMultiplier: uint32(n.bfd.Multiplier),
		}
	}
	return p
}

// bfdUp returns the peers with which BFD is up.
func (g *bgpServer) bfdUp(ctx context.Context) map[netip.Addr]bool {
	up := map[netip.Addr]bool{}
	g.s.ListBfdPeer(ctx, func(addr string, s *api.BfdPeerState) {
		if a, err := netip.ParseAddr(addr); err == nil && s.SessionState == api.BfdSessionState_BFD_SESSION_STATE_UP {
			up[a] = true
		}
	})
	return up
}

// announce adds routes or replaces their attributes.
func (g *bgpServer) announce(routes map[netip.Addr]attributes) error {
	return g.each(routes, func(paths []*apiutil.Path) error {
		answers, err := g.s.AddPath(apiutil.AddPathRequest{Paths: paths})
		for _, a := range answers {
			if err == nil {
				err = a.Error
			}
		}
		return err
	})
}

// withdraw removes routes.
func (g *bgpServer) withdraw(routes []netip.Addr) error {
	routeless := map[netip.Addr]attributes{}
	for _, a := range routes {
		routeless[a] = attributes{}
	}
	return g.each(routeless, func(paths []*apiutil.Path) error {
		return g.s.DeletePath(apiutil.DeletePathRequest{Paths: paths})
	})
}

func (g *bgpServer) each(routes map[netip.Addr]attributes, do func([]*apiutil.Path) error) error {
	if len(routes) == 0 {
		return nil
	}
	sorted := slices.SortedFunc(maps.Keys(routes), netip.Addr.Compare)
	paths := make([]*apiutil.Path, len(sorted))
	for i, a := range sorted {
		var err error
		if paths[i], err = newPath(a, routes[a]); err != nil {
			return fmt.Errorf("route to %s: %w", a, err)
		}
	}
	if err := do(paths); err != nil {
		return fmt.Errorf("%d routes, the first to %s: %w", len(paths), sorted[0], err)
	}
	return nil
}

// newPath returns the route to one address. The export policy sets its next hop for each peer.
func newPath(a netip.Addr, attrs attributes) (*apiutil.Path, error) {
	nlri, err := packet.NewIPAddrPrefix(netip.PrefixFrom(a, a.BitLen()))
	if err != nil {
		return nil, err
	}
	all := []packet.PathAttributeInterface{packet.NewPathAttributeOrigin(packet.BGP_ORIGIN_ATTR_TYPE_IGP)}
	if a.Is4() {
		hop, err := packet.NewPathAttributeNextHop(netip.IPv4Unspecified())
		if err != nil {
			return nil, err
		}
		all = append(all, hop)
	} else {
		reach, err := packet.NewPathAttributeMpReachNLRI(families[ipv6], []packet.PathNLRI{{NLRI: nlri}}, netip.IPv6Unspecified())
		if err != nil {
			return nil, err
		}
		all = append(all, reach)
	}
	if attrs.med != nil {
		all = append(all, packet.NewPathAttributeMultiExitDisc(*attrs.med))
	}
	if attrs.localPreference != nil {
		all = append(all, packet.NewPathAttributeLocalPref(*attrs.localPreference))
	}
	if len(attrs.standard) > 0 {
		all = append(all, packet.NewPathAttributeCommunities(slices.Clone(attrs.standard)))
	}
	if b := attrs.bandwidth; b.bytes > 0 {
		all = append(all, packet.NewPathAttributeExtendedCommunities([]packet.ExtendedCommunityInterface{packet.NewLinkBandwidthExtended(b.asn, b.bytes)}))
	}
	if len(attrs.large) > 0 {
		var values []*packet.LargeCommunity
		for _, c := range attrs.large {
			values = append(values, &packet.LargeCommunity{ASN: c[0], LocalData1: c[1], LocalData2: c[2]})
		}
		all = append(all, packet.NewPathAttributeLargeCommunities(values))
	}
	return &apiutil.Path{Family: families[family(a)], Nlri: nlri, Attrs: all}, nil
}

// updates returns the number of UPDATE messages sent to each peer.
func (g *bgpServer) updates(ctx context.Context) (map[netip.Addr]uint64, error) {
	sent := map[netip.Addr]uint64{}
	err := g.eachPeer(ctx, func(a netip.Addr, s *api.PeerState) { sent[a] = s.GetMessages().GetSent().GetUpdate() })
	return sent, err
}

// established returns the peers that gobgp sends updates to. The event of the same name arrives earlier.
func (g *bgpServer) established(ctx context.Context) (map[netip.Addr]bool, error) {
	all := map[netip.Addr]bool{}
	err := g.eachPeer(ctx, func(a netip.Addr, s *api.PeerState) {
		all[a] = s.GetSessionState() == api.PeerState_SESSION_STATE_ESTABLISHED
	})
	return all, err
}

func (g *bgpServer) eachPeer(ctx context.Context, do func(netip.Addr, *api.PeerState)) error {
	err := g.s.ListPeer(ctx, &api.ListPeerRequest{}, func(p *api.Peer) {
		if a, err := netip.ParseAddr(p.GetConf().GetNeighborAddress()); err == nil {
			do(a, p.GetState())
		}
	})
	if err != nil {
		return fmt.Errorf("read the state of peers: %w", err)
	}
	return nil
}
