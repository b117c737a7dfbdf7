package client

import (
	"net/netip"
	"testing"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/isthmus-net/isthmus/controlplane/api/v1alpha1"
	"github.com/isthmus-net/isthmus/controlplane/broker/internal/quota"
)

// A member extends itself inside of its supernets, at most once in an interval, and what it states beyond them changes nothing.
func TestExtensionsOfAMember(t *testing.T) {
	t.Parallel()
	q := newQuotaBroker(t, quota.Defaults())
	east := &v1alpha1.Member{ObjectMeta: metav1.ObjectMeta{Name: "east"}, Spec: v1alpha1.MemberSpec{
		ClusterID: "east", PodCIDRs: []string{"10.1.0.0/16"}, PodSupernets: []string{"10.128.0.0/10"},
	}}
	q.member(east, false)
	now := time.Unix(1000, 0)
	believed := func(address string, want bool) {
		t.Helper()
		if err := q.Registry().CheckEndpoint("east", netip.MustParseAddr(address)); (err == nil) != want {
			t.Errorf("%s: %v, want %t", address, err, want)
		}
	}
	for _, step := range []struct {
		after   time.Duration
		stated  string
		changed bool
	}{
		{0, "10.9.0.0/24,0.0.0.0/0", false},
		{extendInterval, "10.128.0.0/24,10.9.0.0/24", true},
		{extendInterval, "10.9.0.0/24,10.128.0.0/24", false}, // in another order
		{time.Second, "10.128.0.0/23", false},                // too early
		{extendInterval, "10.128.0.0/23", true},
	} {
		now = now.Add(step.after)
		if changed := q.registry.extend("east", step.stated, now); changed != step.changed {
			t.Errorf("%s after %s: changed %t, want %t", step.stated, step.after, changed, step.changed)
		}
	}
	believed("10.128.1.1", true)
	believed("10.128.2.1", false)
	believed("10.9.0.1", false)
	q.registry.extend("west", "10.128.3.0/24", now)
	if err := q.Registry().CheckEndpoint("west", netip.MustParseAddr("10.128.3.1")); err == nil {
		t.Error("a member without a supernet extended itself into that of another")
	}

	east.Spec.PodSupernets = nil // the administrator takes it back
	q.member(east, false)
	believed("10.128.1.1", false)
	east.Spec.PodSupernets = []string{"10.128.0.0/10"}
	q.member(east, false)
	believed("10.128.1.1", true)
	east.Spec.LeftAt = new(metav1.Now())
	q.member(east, false)
	east.Spec.LeftAt = nil
	q.member(east, false) // which joins again
	believed("10.128.1.1", false)
}
