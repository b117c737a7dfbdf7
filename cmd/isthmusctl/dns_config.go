package main

import (
	"context"
	"errors"
	"fmt"
	"net"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/client-go/util/retry"
	"sigs.k8s.io/controller-runtime/pkg/client"
)

// corefileKey is the key of the Corefile in a ConfigMap.
const corefileKey = "Corefile"

// dnsConfig is a ConfigMap with a Corefile of the cluster's DNS.
type dnsConfig struct {
	name string // of the server, such as CoreDNS
	key  client.ObjectKey
	// node means one server per node, which answers for that node.
	node bool
	// must makes a missing ConfigMap an error.
	must bool
}

// configNames are the flags that name the ConfigMaps.
type configNames struct{ coreDNS, nodeLocal string }

// The default ConfigMaps.
const (
	usualCoreDNS   = "kube-system/coredns"
	usualNodeLocal = "kube-system/node-local-dns"
)

// configs returns the configs of n. A ConfigMap that the user named must exist.
func (n configNames) configs() ([]dnsConfig, error) {
	all := []dnsConfig{{name: "CoreDNS"}, {name: "NodeLocal DNSCache", node: true}}
	var faults []error
	for i, f := range []struct{ flag, text, usual string }{{"--coredns", n.coreDNS, usualCoreDNS}, {"--node-local-dns", n.nodeLocal, usualNodeLocal}} {
		namespace, name, ok := strings.Cut(f.text, "/")
		key := client.ObjectKey{Namespace: namespace, Name: name}
		if !ok || namespace == "" || name == "" {
			faults = append(faults, fmt.Errorf("%s=%s is not NAMESPACE/NAME of a ConfigMap, such as %s", f.flag, f.text, f.usual))
		}
		all[i].key, all[i].must = key, f.text != f.usual
	}
	return all, errors.Join(faults...)
}

// loadedConfig is a dnsConfig with its content.
type loadedConfig struct {
	dnsConfig
	config *corev1.ConfigMap
	text   string // of the Corefile
	parts  corefile
}

// String names the config in messages.
func (c dnsConfig) String() string { return fmt.Sprintf("%s (ConfigMap %s)", c.name, c.key) }

// read loads the config; nil if it does not exist.
func (c dnsConfig) read(ctx context.Context, api client.Client) (*loadedConfig, error) {
	is := &loadedConfig{dnsConfig: c, config: &corev1.ConfigMap{}}
	err := api.Get(ctx, c.key, is.config)
	switch {
	case apierrors.IsNotFound(err) && !c.must:
		return nil, nil
	case apierrors.IsNotFound(err):
		return nil, fmt.Errorf("ConfigMap %s does not exist; name the one with the Corefile of %s", c.key, c.name)
	case err != nil:
		return nil, fmt.Errorf("read ConfigMap %s: %w", c.key, err)
	}
	text, ok := is.config.Data[corefileKey]
	if !ok {
		return nil, fmt.Errorf("ConfigMap %s has no key %s; name the one with the Corefile of %s", c.key, corefileKey, c.name)
	}
	is.text = text
	if is.parts, err = parseCorefile(text); err != nil {
		return nil, fmt.Errorf("the Corefile of %s: %w", c, err)
	}
	return is, nil
}

// errNoCorefile means that no config exists.
var errNoCorefile = errors.New("give the one with the Corefile of the cluster's DNS")

// readConfigs loads all existing configs. Without any it returns errNoCorefile.
func readConfigs(ctx context.Context, c client.Client, configs []dnsConfig) ([]*loadedConfig, error) {
	var found []*loadedConfig
	for _, s := range configs {
		is, err := s.read(ctx, c)
		if err != nil {
			return nil, err
		}
		if is != nil {
			found = append(found, is)
		}
	}
	if len(found) == 0 {
		return nil, fmt.Errorf("neither ConfigMap %s nor %s exists; %w with --coredns or --node-local-dns", configs[0].key, configs[1].key, errNoCorefile)
	}
	return found, nil
}

// edit returns the new Corefile of a config. It is called again after a conflicting write.
type edit func(is *loadedConfig) (want string, err error)

// installing returns the edit that adds or updates the stub, in the place of a foreign server block if replace says so.
func installing(upstreams []string, replace bool) edit {
	return func(is *loadedConfig) (string, error) {
		if replace {
			is.parts = is.parts.replacing()
		}
		if err := is.parts.refusal(); err != nil {
			return "", fmt.Errorf("%s: %w", is, err)
		}
		if !is.parts.reloads() {
			return "", fmt.Errorf("%s: its Corefile has no plugin reload, so its server would ignore a change; add a line `reload` to a server block, run `kubectl rollout restart` on the server, and try again", is)
		}
		s, err := is.parts.stub(upstreams)
		if err != nil {
			return "", fmt.Errorf("%s: %w", is, err)
		}
		return is.parts.with(&s), nil
	}
}

// uninstalling is the edit that removes the stub, and puts back what that replaced.
func uninstalling(is *loadedConfig) (string, error) { return is.parts.with(nil), nil }

// apply edits the ConfigMap. It keeps concurrent changes of other writers, and repeats the edit on them.
func (c dnsConfig) apply(ctx context.Context, api client.Client, e edit) error {
	return retry.RetryOnConflict(retry.DefaultBackoff, func() error {
		is, err := c.read(ctx, api)
		if err != nil {
			return err
		}
		if is == nil {
			return fmt.Errorf("ConfigMap %s was deleted meanwhile", c.key)
		}
		want, err := e(is)
		if err != nil || want == is.text {
			return err
		}
		is.config.Data[corefileKey] = want
		if err := api.Update(ctx, is.config); err != nil { // with the read resourceVersion
			return fmt.Errorf("write ConfigMap %s: %w", c.key, err)
		}
		return nil
	})
}

// servers lists the pods that mount the ConfigMap, by node.
func (c dnsConfig) servers(ctx context.Context, api client.Client) ([]corev1.Pod, error) {
	pods := &corev1.PodList{}
	if err := api.List(ctx, pods, client.InNamespace(c.key.Namespace)); err != nil {
		return nil, fmt.Errorf("list pods in namespace %s: %w", c.key.Namespace, err)
	}
	found := slices.DeleteFunc(pods.Items, func(p corev1.Pod) bool {
		return p.DeletionTimestamp != nil || p.Status.Phase != corev1.PodRunning || !slices.ContainsFunc(p.Spec.Volumes, c.mounts)
	})
	slices.SortFunc(found, func(a, b corev1.Pod) int {
		return strings.Compare(a.Spec.NodeName+" "+a.Name, b.Spec.NodeName+" "+b.Name)
	})
	return found, nil
}

// mounts reports whether a volume contains the ConfigMap.
func (c dnsConfig) mounts(v corev1.Volume) bool {
	if v.ConfigMap != nil {
		return v.ConfigMap.Name == c.key.Name
	}
	return v.Projected != nil && slices.ContainsFunc(v.Projected.Sources, func(p corev1.VolumeProjection) bool {
		return p.ConfigMap != nil && p.ConfigMap.Name == c.key.Name
	})
}

// addressesOf returns the addresses at which a pod serves a stub: those of its bind directive, or else the pod's own.
func addressesOf(pod corev1.Pod, st stub) []string {
	var all []string
	for _, a := range st.addresses() {
		all = append(all, net.JoinHostPort(a.String(), st.port()))
	}
	if len(all) == 0 && pod.Status.PodIP != "" {
		all = append(all, net.JoinHostPort(pod.Status.PodIP, st.port()))
	}
	return all
}
