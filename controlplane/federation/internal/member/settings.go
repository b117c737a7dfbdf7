package member

import (
	"cmp"
	"encoding/json"
	"slices"

	federationv1alpha1 "github.com/isthmus-net/isthmus/controlplane/api/federation/v1alpha1"
)

// Settings are the fields of a supervisor's Federation that have to be the same in all supervisors. The zero value is unknown
// settings. Settings with the same content are equal.
type Settings struct {
	text   string // JSON: fields by their names
	Denied bool   // the supervisor's API server does not let leaders read them
}

// SettingsOf returns the settings of a spec.
func SettingsOf(spec federationv1alpha1.FederationSpec) Settings {
	members := make([]federationv1alpha1.MemberCluster, 0, len(spec.Members))
	for _, m := range spec.Members { // each supervisor reaches a member at an address and with a Secret of its own
		members = append(members, federationv1alpha1.MemberCluster{ClusterID: m.ClusterID, ExternalCIDRs: m.ExternalCIDRs})
	}
	slices.SortFunc(members, func(a, b federationv1alpha1.MemberCluster) int { return cmp.Compare(a.ClusterID, b.ClusterID) })
	text, err := json.Marshal(map[string]any{
		"clusterSet": spec.ClusterSet, "members": members, "clusterSetIP": spec.ClusterSetIP, "hostnameTemplate": spec.HostnameTemplate,
		"policies": spec.Policies, "grants": spec.Grants,
		"systemNamespace": cmp.Or(spec.SystemNamespace, federationv1alpha1.DefaultSystemNamespace),
	})
	if err != nil {
		panic(err) // it consists of strings
	}
	return Settings{text: string(text)}
}

// Differences returns the names of the fields in which s and o differ, sorted. Unknown settings differ in nothing.
func (s Settings) Differences(o Settings) []string {
	var mine, others map[string]json.RawMessage
	if json.Unmarshal([]byte(s.text), &mine) != nil || json.Unmarshal([]byte(o.text), &others) != nil {
		return nil
	}
	var names []string
	for name := range mine {
		if string(mine[name]) != string(others[name]) {
			names = append(names, name)
		}
	}
	slices.Sort(names)
	return names
}
