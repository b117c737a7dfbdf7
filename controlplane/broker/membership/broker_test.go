package membership

import (
	cmp2 "cmp"
	"errors"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/isthmus-net/isthmus/controlplane/api/v1alpha1"
	"github.com/isthmus-net/isthmus/controlplane/internal/kube/admin"
	"github.com/isthmus-net/isthmus/tools/conformance"
)

func TestDeployBrokerTwiceKeepsSettings(t *testing.T) {
	info, asAdmin := deploy(t, Broker{Namespace: "twice"})
	get := func() *v1alpha1.ClusterSetConfig {
		t.Helper()
		c := &v1alpha1.ClusterSetConfig{}
		if err := asAdmin.Get(t.Context(), client.ObjectKey{Namespace: "twice", Name: v1alpha1.ClusterSetConfigName}, c); err != nil {
			t.Fatal(err)
		}
		return c
	}
	first := get()
	if first.Spec.ClusterSetID != "clusterset" || !first.Spec.ClusterSetIPEnabled || len(first.Spec.ClusterSetIPCIDRRange) != 2 || first.Spec.ClusterSetIPCIDRRange[0] != "243.0.0.0/8" {
		t.Errorf("defaults: %+v", first.Spec)
	}
	conformance.Holds(t, "V6")
	again, _ := deploy(t, Broker{Namespace: "twice"})
	if second := get(); second.ResourceVersion != first.ResourceVersion {
		t.Errorf("a second run wrote the settings again: %+v", second.Spec)
	}
	if again.Token == info.Token {
		t.Error("a second run gave the same token")
	}

	// Without members every setting may change.
	disabled := false
	b := Broker{
		Namespace: "twice", ClusterSetID: "prod", ClusterSetIPEnabled: &disabled, Ranges: cidrs("242.0.0.0/8"), ClusterSize: 5000,
		Settings: v1alpha1.Settings{PortMerge: v1alpha1.PortMergeIntersection},
	}
	file, _ := deploy(t, b)
	want := v1alpha1.ClusterSetConfigSpec{
		ClusterSetID: "prod", ClusterSetIPCIDRRange: []string{"242.0.0.0/8"}, ClusterSetIPClusterSize: 8192,
		AdmitUpTo: defaultAdmitted, Settings: v1alpha1.Settings{PortMerge: v1alpha1.PortMergeIntersection},
	}
	if diff := cmp.Diff(want, get().Spec); diff != "" {
		t.Errorf("settings (-want +have):\n%s", diff)
	}
	conformance.Holds(t, "V3", "V36", "V40")

	// The broker-info file and the ConfigMap in Submariner's format have the same settings.
	if *file.ClusterSetIPEnabled || file.ClusterSetIPClusterSize != 8192 || file.Settings != want.Settings || !slices.Equal(file.ClusterSetIPCIDRRange, want.ClusterSetIPCIDRRange) {
		t.Errorf("the file says %+v", file)
	}
	conformance.Holds(t, "V37")
	texts := &corev1.ConfigMap{}
	if err := asAdmin.Get(t.Context(), client.ObjectKey{Namespace: "twice", Name: "isthmus-clusterset-ip"}, texts); err != nil {
		t.Fatal(err)
	}
	wantTexts := map[string]string{
		"clustersetIPEnabled": "false", "clustersetIPCIDRRange": `["242.0.0.0/8"]`, "clustersetIPClusterSize": "8192", "clusterinfo": "[]",
	}
	if diff := cmp.Diff(wantTexts, texts.Data); diff != "" {
		t.Errorf("ConfigMap (-want +have):\n%s", diff)
	}
}

// With the profile lighthouse no Service gets a ClusterSetIP by default, unless the administrator enables it.
func TestProfileDecidesAboutClusterSetIPs(t *testing.T) {
	yes := true
	lighthouse := v1alpha1.Settings{Profile: v1alpha1.ProfileLighthouse}
	for name, tc := range map[string]struct {
		runs []Broker
		want bool
	}{
		"defaults":                        {[]Broker{{}}, true},
		"lighthouse":                      {[]Broker{{Settings: lighthouse}}, false},
		"lighthouse, enabled":             {[]Broker{{Settings: lighthouse, ClusterSetIPEnabled: &yes}}, true},
		"enabled, then the profile again": {[]Broker{{Settings: lighthouse, ClusterSetIPEnabled: &yes}, {Settings: lighthouse}}, true},
		"to lighthouse":                   {[]Broker{{}, {Settings: lighthouse}}, false},
		"to lighthouse and back":          {[]Broker{{Settings: lighthouse}, {Settings: v1alpha1.Settings{Profile: v1alpha1.ProfileKEP}}}, true},
	} {
		t.Run(name, func(t *testing.T) {
			spec := v1alpha1.ClusterSetConfigSpec{ClusterSetIPEnabled: true}
			for _, b := range tc.runs {
				spec = b.amend(spec)
			}
			if spec.ClusterSetIPEnabled != tc.want {
				t.Errorf("enabled is %t", spec.ClusterSetIPEnabled)
			}
		})
	}
}

func TestDeployBrokerRefuses(t *testing.T) {
	for name, tc := range map[string]struct {
		broker Broker
		want   string
	}{
		"a block larger than half of the range": {Broker{Ranges: cidrs("243.0.0.0/16"), ClusterSize: 40000}, "a block of 40000 addresses is more than half of range 243.0.0.0/16; choose at most 32768"},
		"a tiny block":                          {Broker{ClusterSize: 3}, "a block of 3 addresses is too small; it needs at least 4"},
		"a range of one block":                  {Broker{Ranges: cidrs("243.0.0.0/30")}, "243.0.0.0/30 is too small"},
		"an invalid id":                         {Broker{ClusterSetID: "a_b"}, "the ClusterSet's id follows the rules of cluster ids"},
		"too many clusters":                     {Broker{TokenTTL: time.Hour, AdmitAnyCluster: true, AdmitAtMost: maxAdmitted + 1}, "cannot admit 10001 clusters; choose 1 to 10000"},
		"a short lifetime":                      {Broker{TokenTTL: time.Second, AdmitAnyCluster: true}, "no credential for 1s"},
	} {
		t.Run(name, func(t *testing.T) {
			tc.broker.TokenTTL = cmp2.Or(tc.broker.TokenTTL, time.Hour)
			if err := tc.broker.validate(); err == nil || !strings.Contains(err.Error(), tc.want) {
				t.Errorf("got %v", err)
			}
		})
	}
}

func TestDeployBrokerRefusesItsOwnAddresses(t *testing.T) {
	asAdmin := newClient(t, brokerServer.Config(t))
	for name, rng := range map[string]string{"inside": "10.96.7.0/24", "around": "fd00:96::/48"} {
		t.Run(name, func(t *testing.T) {
			err := admin.Await(t.Context(), "no refusal", func() (bool, error) {
				_, err := DeployBroker(t.Context(), asAdmin, Broker{Namespace: "own-" + name, Ranges: cidrs(rng), TokenTTL: time.Hour})
				return errors.Is(err, ErrOverlap), nil
			})
			if err != nil {
				t.Error(err)
			}
			list := &v1alpha1.ClusterSetConfigList{}
			if err := asAdmin.List(t.Context(), list, client.InNamespace("own-"+name)); err != nil || len(list.Items) != 0 {
				t.Errorf("settings were written: %+v, %v", list.Items, err)
			}
		})
	}
}

// A broker-info file admits as many clusters as its administrator said, and the next file as many more.
func TestAdmitAtMost(t *testing.T) {
	b := Broker{Namespace: "atmost", Ranges: cidrs("243.0.0.0/8"), AdmitAtMost: 1}
	info, asAdmin := deploy(t, b)
	broker, member := newClient(t, info.RESTConfig()), cluster(t, &memberServer)
	awaitPolicies(t, broker, "atmost")
	if _, err := Join(t.Context(), broker, member, request(info, "a", 1)); err != nil {
		t.Fatal(err)
	}
	second := request(info, "b", 2)
	if _, err := Join(t.Context(), broker, cluster(t, &otherServer), second); err == nil || !strings.Contains(err.Error(), "the broker-info file admits no more clusters; invite each further one: isthmusctl invite ID") {
		t.Fatalf("joined as the second of one: %v", err)
	}
	if all := brokerConfig(t, asAdmin, "atmost").Spec.Members; len(all) != 1 {
		t.Errorf("the ClusterSetConfig lists %+v", all)
	}
	info, _ = deploy(t, b)
	second.Broker = info
	if _, err := Join(t.Context(), newClient(t, info.RESTConfig()), cluster(t, &otherServer), second); err != nil {
		t.Errorf("joined with a second file: %v", err)
	}
}
