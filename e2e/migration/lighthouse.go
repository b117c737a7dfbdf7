package main

import (
	"context"
	_ "embed"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"

	"github.com/isthmus-net/isthmus/tools/compile"
	"github.com/isthmus-net/isthmus/tools/images/oci"
	"github.com/isthmus-net/isthmus/tools/lab/topology"
	"github.com/isthmus-net/isthmus/tools/process"
	"github.com/isthmus-net/isthmus/tools/testbed"
)

var (
	//go:embed testdata/operator.yaml
	operator string
	//go:embed testdata/broker.yaml
	submarinerBroker string
	//go:embed testdata/registration.yaml
	registration string
	//go:embed testdata/lighthouse.yaml
	lighthouse string
	//go:embed testdata/shop.yaml
	shop string
)

// module is the path of Lighthouse's module.
const module = "github.com/submariner-io/lighthouse"

// patience is how long anything may take to become as it should.
const patience = 3 * time.Minute

// checkClone returns an error unless dir is a clone of Lighthouse.
func checkClone(dir string) error {
	path := filepath.Join(dir, "go.mod")
	text, err := os.ReadFile(path)
	if errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("--lighthouse: %s is missing; clone %s beside this repository, or name its folder", path, module)
	}
	if err != nil {
		return fmt.Errorf("--lighthouse: %w", err)
	}
	if first, _, _ := strings.Cut(string(text), "\n"); strings.TrimSpace(strings.TrimPrefix(first, "module ")) != module {
		return fmt.Errorf("--lighthouse: %s is not of module %s, but begins with %q", path, module, first)
	}
	return nil
}

// buildLighthouse builds the images of a clone's programs, and returns their archives in dir.
func buildLighthouse(ctx context.Context, clone, dir string) (archives []string, err error) {
	for _, program := range []struct{ name, module, pkg string }{{"agent", ".", "./pkg/agent"}, {"coredns", "coredns", "."}} {
		fmt.Fprintln(os.Stdout, "build Lighthouse's", program.name)
		file := filepath.Join(dir, "lighthouse-"+program.name)
		build := compile.Go(ctx, "build", "-ldflags=-s -w", "-o", file, program.pkg)
		build.Dir = filepath.Join(clone, program.module)
		if out, err := build.CombinedOutput(); err != nil {
			return nil, fmt.Errorf("build %s in %s: %w\n%s", program.pkg, build.Dir, err, out)
		}
		archive := file + ".tar"
		spec := oci.Spec{Names: []string{"lighthouse/" + program.name + ":dev"}, Entrypoint: []string{"/" + program.name}}
		if err := oci.Write(archive, spec, func(l *oci.Layer) error {
			return errors.Join(l.File("/"+program.name, file, 0o755), l.Dir("/tmp", 0o777))
		}); err != nil {
			return nil, err
		}
		archives = append(archives, archive)
	}
	return archives, nil
}

// deploySubmariner makes the clusters a ClusterSet of Submariner, with Services that all of them use.
func (m *migration) deploySubmariner(ctx context.Context) error {
	list := compile.Go(ctx, "list", "-m", "-f", "{{.Dir}}", "sigs.k8s.io/mcs-api")
	list.Dir = m.lighthouse
	out, err := process.Output(list)
	if err != nil {
		return fmt.Errorf("find the MCS API that Lighthouse uses: %w", err)
	}
	kinds := filepath.Join(strings.TrimSpace(out), "config", "crd")
	for _, c := range append([]string{broker}, clusters...) {
		if _, err := m.Kubectl(ctx, c, "apply", "--filename", kinds); err != nil {
			return err
		}
		if err := m.Apply(ctx, c, operator); err != nil {
			return err
		}
	}
	if err := m.Apply(ctx, broker, submarinerBroker); err != nil {
		return err
	}
	values, err := m.brokerAccess(ctx)
	if err != nil {
		return err
	}
	for _, c := range m.members() {
		m.Step("Lighthouse and a shop in %s", c.Name)
		fill := strings.NewReplacer(append(values, "CLUSTER_ID", c.Name, "POD_CIDR", first(c.PodCIDRs()), "SERVICE_CIDR", first(c.ServiceCIDRs()))...)
		if err := m.Apply(ctx, broker, fill.Replace(registration)); err != nil {
			return err
		}
		if err := m.Apply(ctx, c.Name, fill.Replace(lighthouse)+"---\n"+fill.Replace(shop)); err != nil {
			return err
		}
	}
	for _, c := range m.members() {
		if err := m.forwardNames(ctx, c); err != nil {
			return err
		}
	}
	return nil
}

// members are the clusters of the lab without the broker's.
func (m *migration) members() topology.Topology {
	return m.Lab.Topology()[:len(clusters)]
}

func first(cidrs []netip.Prefix) string { return cidrs[0].String() }

// brokerAccess returns what lighthouse.yaml is to say about Submariner's broker, as arguments of strings.NewReplacer.
func (m *migration) brokerAccess(ctx context.Context) ([]string, error) {
	cfg, err := m.Lab.RESTConfig(broker)
	if err != nil {
		return nil, err
	}
	secret := corev1.Secret{}
	err = testbed.Eventually(ctx, patience, func(ctx context.Context) error {
		err := m.Get(ctx, broker, "/api/v1/namespaces/submariner-k8s-broker/secrets/submariner-k8s-broker-client-token", &secret)
		if err == nil && len(secret.Data[corev1.ServiceAccountTokenKey]) == 0 {
			err = errors.New("the account of Submariner's broker has no token")
		}
		return err
	})
	return []string{
		"BROKER_SERVER", strings.TrimPrefix(cfg.Host, "https://"),
		"BROKER_TOKEN", string(secret.Data[corev1.ServiceAccountTokenKey]),
		"BROKER_CA", base64.StdEncoding.EncodeToString(secret.Data[corev1.ServiceAccountRootCAKey]),
	}, err
}

// forwardNames lets a cluster's DNS ask Lighthouse's, as Submariner's operator does.
func (m *migration) forwardNames(ctx context.Context, c topology.Cluster) error {
	for _, what := range []string{"deployment/submariner-lighthouse-coredns", "deployment/submariner-lighthouse-agent"} {
		if _, err := m.Kubectl(ctx, c.Name, "rollout", "status", what, "--namespace", "submariner-operator", "--timeout", patience.String()); err != nil {
			return err
		}
	}
	server := corev1.Service{}
	if err := m.Get(ctx, c.Name, "/api/v1/namespaces/submariner-operator/services/submariner-lighthouse-coredns", &server); err != nil {
		return err
	}
	config := corev1.ConfigMap{}
	if err := m.Get(ctx, c.Name, "/api/v1/namespaces/kube-system/configmaps/coredns", &config); err != nil {
		return err
	}
	block := "#lighthouse-start AUTO-GENERATED SECTION. DO NOT EDIT\nclusterset.local:53 {\n    forward . " + server.Spec.ClusterIP + "\n}\n#lighthouse-end\n"
	patch, err := json.Marshal(map[string]any{"data": map[string]string{"Corefile": block + config.Data["Corefile"]}})
	if err != nil {
		return err
	}
	_, err = m.Kubectl(ctx, c.Name, "patch", "configmap", "coredns", "--namespace", "kube-system", "--patch", string(patch))
	return err
}
