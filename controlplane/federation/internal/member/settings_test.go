package member

import (
	"slices"
	"testing"

	federationv1alpha1 "github.com/isthmus-net/isthmus/controlplane/api/federation/v1alpha1"
)

// Supervisors may reach members at different addresses, and list them in any order. Other differences are named.
func TestDifferences(t *testing.T) {
	base := federationv1alpha1.FederationSpec{ClusterSet: "prod", Members: []federationv1alpha1.MemberCluster{
		{ClusterID: "a", Server: "https://192.0.2.1:6443", Secret: "federation-a"}, {ClusterID: "b", Server: "https://192.0.2.2:6443", Secret: "federation-b"},
	}}
	for name, tc := range map[string]struct {
		change func(*federationv1alpha1.FederationSpec)
		want   []string
	}{
		"nothing": {func(*federationv1alpha1.FederationSpec) {}, nil},
		"addresses and Secrets": {func(s *federationv1alpha1.FederationSpec) {
			s.Members[0].Server, s.Members[0].Secret = "https://[2001:db8::1]:6443", "other"
		}, nil},
		"order of members":     {func(s *federationv1alpha1.FederationSpec) { slices.Reverse(s.Members) }, nil},
		"the default, written": {func(s *federationv1alpha1.FederationSpec) { s.SystemNamespace = "isthmus-system" }, nil},
		"a member":             {func(s *federationv1alpha1.FederationSpec) { s.Members = s.Members[:1] }, []string{"members"}},
		"external networks":    {func(s *federationv1alpha1.FederationSpec) { s.Members[1].ExternalCIDRs = []string{"192.0.2.0/24"} }, []string{"members"}},
		"no grants, not open":  {func(s *federationv1alpha1.FederationSpec) { s.Grants = []federationv1alpha1.Grant{} }, []string{"grants"}},
		"many": {func(s *federationv1alpha1.FederationSpec) {
			s.SystemNamespace, s.HostnameTemplate, s.ClusterSetIP.Enabled = "global", "{{.Name}}.example.org", true
			s.Policies.Kinds = []federationv1alpha1.PolicyKind{{Version: "v1", Kind: "Limit"}}
		}, []string{"clusterSetIP", "hostnameTemplate", "policies", "systemNamespace"}},
	} {
		t.Run(name, func(t *testing.T) {
			other := *base.DeepCopy()
			tc.change(&other)
			if got := SettingsOf(base).Differences(SettingsOf(other)); !slices.Equal(got, tc.want) {
				t.Errorf("they differ in %v, want %v", got, tc.want)
			}
		})
	}
	if got := SettingsOf(base).Differences(Settings{}); got != nil {
		t.Errorf("settings that are unknown differ in %v", got)
	}
}
