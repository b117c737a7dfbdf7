// Package liveness: temporary shape until the real one lands; delete this file when it does.
package liveness

import (
	"context"
	"log/slog"
	"net/netip"
	"time"

	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/isthmus-net/isthmus/controlplane/clusterset"
)

type Mode int

const (
	ByEvidence Mode = iota
	Lease
)

type Times struct{ Renew, Stale, HardTTL, Damping time.Duration }

func DefaultTimes() Times {
	return Times{5 * time.Second, 20 * time.Second, 5 * time.Minute, 30 * time.Second}
}
func (t Times) Scale(f float64) Times {
	s := func(d time.Duration) time.Duration { return time.Duration(float64(d) * f) }
	return Times{s(t.Renew), s(t.Stale), s(t.HardTTL), s(t.Damping)}
}

type State int

func (State) String() string { return "live" }

type Verdict int
type Evidence interface {
	Answers(context.Context, clusterset.ClusterID) Verdict
}
type Probe struct {
	Endpoints func(clusterset.ClusterID) []netip.AddrPort
}

func (*Probe) Answers(context.Context, clusterset.ClusterID) Verdict { return 0 }

type Config struct {
	Self     clusterset.ClusterID
	Times    Times
	Mode     Mode
	Log      *slog.Logger
	Evidence Evidence
	Changed  func(clusterset.ClusterID)
}
type Tracker struct{}

func NewTracker(Config) *Tracker                                   { return &Tracker{} }
func (*Tracker) Renewed(clusterset.ClusterID, time.Time)           {}
func (*Tracker) Gone(clusterset.ClusterID)                         {}
func (*Tracker) Forget(clusterset.ClusterID)                       {}
func (*Tracker) Dead(clusterset.ClusterID) bool                    { return false }
func (*Tracker) Offset(clusterset.ClusterID) (time.Duration, bool) { return 0, false }
func (*Tracker) State(clusterset.ClusterID) (State, time.Time)     { return 0, time.Time{} }
func (*Tracker) Start(ctx context.Context) error                   { <-ctx.Done(); return nil }

type Heart struct {
	Self      clusterset.ClusterID
	Client    client.Client
	Namespace string
	Times     Times
	Log       *slog.Logger
}

func (*Heart) Start(ctx context.Context) error { <-ctx.Done(); return nil }
