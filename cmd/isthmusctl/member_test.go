package main

import (
	"net/netip"
	"strings"
	"testing"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/isthmus-net/isthmus/controlplane/api/v1alpha1"
	"github.com/isthmus-net/isthmus/controlplane/broker/membership"
)

// The table of quotas has a row for each member with quotas, and names what waits.
func TestWriteQuotas(t *testing.T) {
	var out strings.Builder
	err := writeQuotas(&out, []memberListed{
		{MemberSpec: v1alpha1.MemberSpec{ClusterID: "left"}},
		{MemberSpec: v1alpha1.MemberSpec{ClusterID: "a"}, Quotas: []membership.QuotaUse{{Kind: "services", Used: 2, Limit: 2, Waiting: 1}, {Kind: "ports", Used: 2, Limit: 20}}},
		{MemberSpec: v1alpha1.MemberSpec{ClusterID: "b"}, Quotas: []membership.QuotaUse{{Kind: "services", Limit: 2}, {Kind: "ports", Limit: 20}}},
	})
	want := "\nQUOTAS  SERVICES      PORTS\na       2/2 (1 wait)  2/20\nb       0/2           0/20\n"
	if err != nil || out.String() != want {
		t.Errorf("printed %q, %v; want %q", out.String(), err, want)
	}
}

// The table of later pods is there only if a member states some.
func TestWritePods(t *testing.T) {
	var out strings.Builder
	members := []memberListed{{MemberSpec: v1alpha1.MemberSpec{ClusterID: "a", PodSupernets: []string{"10.128.0.0/10"}}}}
	if err := writePods(&out, members); err != nil || out.String() != "" {
		t.Errorf("printed %q, %v; want nothing", out.String(), err)
	}
	members[0].ExtendedPodCIDRs = []netip.Prefix{netip.MustParsePrefix("10.128.7.0/24")}
	members = append(members, memberListed{
		MemberSpec: v1alpha1.MemberSpec{ClusterID: "b"}, OutsidePodCIDRs: []netip.Prefix{netip.MustParsePrefix("10.9.0.0/24")}, RefusedServices: 2,
	})
	want := `
LATER PODS  POD CIDRS      STATE
a           10.128.7.0/24  added by the member, inside of 10.128.0.0/10
b           10.9.0.0/24    ignored by other members; isthmusctl member set b --pod-cidr registers all of its pod CIDRs
b           in 2 services  endpoints ignored by other members; the conditions of their ServiceExports name them
`
	if err := writePods(&out, members); err != nil || out.String() != want {
		t.Errorf("printed %q, %v; want %q", out.String(), err, want)
	}
}

// The table of members beyond their quotas is there only if there are some.
func TestWriteOverQuota(t *testing.T) {
	now := time.Now()
	var out strings.Builder
	members := []memberListed{{MemberSpec: v1alpha1.MemberSpec{ClusterID: "a"}}}
	if err := writeOverQuota(&out, members, now); err != nil || out.String() != "" {
		t.Errorf("printed %q, %v; want nothing", out.String(), err)
	}
	members[0].OverQuota = []v1alpha1.OverQuota{{Member: "a", Kind: "services", Used: 12, Limit: 10, Since: metav1.NewTime(now.Add(-time.Minute))}}
	want := "\nOVER QUOTA  STORES       LIMIT  SINCE\na           12 services  10     60s ago; the broker refuses new ones\n"
	if err := writeOverQuota(&out, members, now); err != nil || out.String() != want {
		t.Errorf("printed %q, %v; want %q", out.String(), err, want)
	}
}
