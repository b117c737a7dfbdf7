package tree

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/google/go-cmp/cmp"
	"sigs.k8s.io/yaml"

	"github.com/isthmus-net/isthmus/tools/check/schemas"
	"github.com/isthmus-net/isthmus/tools/compile"
)

// chart is the folder of the chart, from the root.
const chart = "deploy/helm/isthmus"

// helmProgram builds the pinned Helm once, and returns its path.
var helmProgram = sync.OnceValues(func() (string, error) { return compile.Helm(context.Background(), root) })

// helm runs the pinned Helm at the root and returns its output.
func helm(t *testing.T, args ...string) (stdout, stderr string, err error) {
	t.Helper()
	program, err := helmProgram()
	if err != nil {
		t.Fatalf("build helm: %v", err)
	}
	var out, errs bytes.Buffer
	cmd := exec.CommandContext(t.Context(), program, args...)
	cmd.Dir, cmd.Stdout, cmd.Stderr = root, &out, &errs
	err = cmd.Run()
	if exit := (*exec.ExitError)(nil); err != nil && !errors.As(err, &exit) {
		t.Fatalf("run helm: %v", err)
	}
	return out.String(), errs.String(), err
}

// object holds the fields of a Kubernetes object that the tests read.
type object struct {
	Kind     string
	Metadata struct {
		Name   string
		Labels map[string]string
	}
	Spec struct {
		Template struct {
			Spec struct {
				HostNetwork, HostPID          bool
				TerminationGracePeriodSeconds int
				AutomountServiceAccountToken  *bool
				NodeSelector                  map[string]string
				InitContainers, Containers    []container
				Volumes                       []volume
			}
		}
		MinReadySeconds int
		UpdateStrategy  struct {
			Type          string
			RollingUpdate struct{ MaxUnavailable int }
		}
		PolicyTypes     []string // of a NetworkPolicy
		Ingress, Egress []struct{ Ports []port }
	}
	Rules []struct{ APIGroups, Resources, ResourceNames, Verbs []string }
}

type port struct {
	Protocol      string
	Port, EndPort int
}

type volume struct {
	Name     string
	HostPath *struct{ Path string }
	Secret   *struct{ SecretName string }

	Projected *struct {
		Sources []struct {
			Secret struct {
				Name  string
				Items []struct{ Key, Path string }
			}
		}
	}
}

type container struct {
	Name, Image     string
	Args            []string
	SecurityContext struct {
		Privileged               bool
		RunAsUser                *int
		AllowPrivilegeEscalation *bool
		ReadOnlyRootFilesystem   bool
		Capabilities             struct{ Add, Drop []string }
	}
	VolumeMounts []struct {
		Name, MountPath, MountPropagation string
		ReadOnly                          bool
	}
	LivenessProbe, ReadinessProbe struct {
		HTTPGet struct{ Host, Path string }
	}
}

// schemaFolder is for the schemas of checker.
var schemaFolder string

func TestMain(m *testing.M) {
	var err error
	if schemaFolder, err = os.MkdirTemp("", "isthmus-schemas-"); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	code := m.Run()
	os.RemoveAll(schemaFolder)
	os.Exit(code)
}

// checker validates objects with the schemas of Kubernetes, of the chart's CRDs, and of the kinds of others that the chart uses.
var checker = sync.OnceValues(func() (*schemas.Checker, error) {
	crds, err := filepath.Glob(filepath.Join(root, chart, "crds/*.yaml"))
	if err != nil {
		return nil, err
	}
	others, err := filepath.Glob("testdata/*_v1_*.json")
	if err != nil {
		return nil, err
	}
	return schemas.New(context.Background(), root, schemaFolder, crds, others)
})

// rendered returns the YAML that the chart renders with flags of helm. Every rendering of every test is validated here.
func rendered(t *testing.T, args ...string) string {
	t.Helper()
	out, stderr, err := helm(t, append([]string{"template", "isthmus", chart, "--namespace", "isthmus-system"}, args...)...)
	if err != nil {
		t.Fatalf("helm template: %v\n%s", err, stderr)
	}
	kubeconform, err := checker()
	if err != nil {
		t.Fatal(err)
	}
	if err := kubeconform.Check(out); err != nil {
		t.Errorf("kubeconform, with %v:\n%v", args, err)
	}
	return out
}

// documents returns the YAML documents that the chart renders with flags of helm.
func documents(t *testing.T, args ...string) []string {
	t.Helper()
	return strings.Split(rendered(t, args...), "\n---\n")
}

// render returns the objects of the chart, by kind and name.
func render(t *testing.T, args ...string) map[string]object {
	t.Helper()
	objects := map[string]object{}
	for _, doc := range documents(t, args...) {
		var o object
		if err := yaml.Unmarshal([]byte(doc), &o); err != nil && !errors.Is(err, io.EOF) {
			t.Fatalf("parse the output of helm: %v\n%s", err, doc)
		}
		if o.Kind != "" {
			objects[o.Kind+" "+o.Metadata.Name] = o
		}
	}
	return objects
}

// The chart refuses an unknown value, and a value of the wrong type, and names it.
func TestChartRefusesTypos(t *testing.T) {
	t.Parallel()
	tests := map[string]struct {
		set  string
		says []string
	}{
		"unknown at the top":                {"agnet.image=x", []string{"agnet"}},
		"unknown below":                     {"agent.bpfs.mount=false", []string{"/agent", "bpfs"}},
		"a word for a switch":               {"agent.bpffs.mount=sometimes", []string{"/agent/bpffs/mount", "boolean"}},
		"a word for a number":               {"controller.replicas=many", []string{"/controller/replicas", "integer"}},
		"relative path":                     {"agent.bpffs.path=sys/fs/bpf", []string{"/agent/bpffs/path", "sys/fs/bpf"}},
		"a name for an address":             {"agent.dns.listen={localhost}", []string{"/agent/dns/listen/0", "localhost"}},
		"a negative rate of logged queries": {"agent.dns.queryLog=-1", []string{"/agent/dns/queryLog"}},
		"a name for a resolver":             {"agent.dns.fastPath={kube-dns}", []string{"/agent/dns/fastPath/0", "kube-dns"}},
		"unknown profile":                   {"agent.dns.profile=submariner", []string{"/agent/dns/profile", "lighthouse"}},
		"another implementation by name":    {"agent.imports=lighthouse", []string{"/agent/imports", "any"}},
		"an address for a range":            {"agent.clusterSetIPRanges={243.0.0.1}", []string{"/agent/clusterSetIPRanges/0", "243.0.0.1"}},
		"any imports without a range":       {"agent.imports=any", []string{"agent.imports is any", "agent.clusterSetIPRanges"}},
		"a TTL of a day":                    {"agent.dns.ttl=86400", []string{"/agent/dns/ttl", "3,600"}},
		"a word for a choice":               {"agent.dns.clusterScoped=often", []string{"/agent/dns/clusterScoped"}},
		"slash after registry":              {"image.registry=example.org/", []string{"/image/registry", "example.org/"}},
		"a tag for a digest":                {"image.digests.isthmus/agent=v1", []string{"/image/digests/isthmus~1agent"}},
		"a word for labels":                 {"agent.podLabels=yes", []string{"/agent/podLabels", "object"}},
		"unknown pull policy":               {"image.pullPolicy=Sometimes", []string{"/image/pullPolicy", "IfNotPresent"}},
		"all nodes but written 0":           {"agent.maxUnavailable=0%", []string{"/agent/maxUnavailable"}},
		"unknown balancer":                  {"gateway.balancer=ipvs", []string{"/gateway/balancer", "nftables"}},
		"a gateway without a cluster":       {"gateway.enabled=true", []string{"gateway.cluster is missing", "gatewayController.settings.cluster"}},
		"XDP without ebpf":                  {"gateway.enabled=true,gateway.cluster=a,gateway.balancer=nftables,gateway.xdp=auto", []string{"gateway.xdp", "gateway.balancer"}},
		"labels by another name":            {"nameOverride=net", []string{"nameOverride is not supported", "fullnameOverride"}},
		"upper case in names":               {"fullnameOverride=Net", []string{"/fullnameOverride"}},
		"a name of a ServiceAccount":        {"agent.serviceAccount.name=net", []string{"/agent/serviceAccount", "name"}},
		"a name for a port":                 {"gatewayController.networkPolicy.ports={https}", []string{"/gatewayController/networkPolicy/ports/0"}},
	}
	for name, tc := range tests {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			_, stderr, err := helm(t, "template", "isthmus", chart, "--set", tc.set)
			if err == nil {
				t.Fatalf("--set %s was accepted", tc.set)
			}
			for _, word := range tc.says {
				if !strings.Contains(stderr, word) {
					t.Errorf("--set %s: the message does not name %q:\n%s", tc.set, word, stderr)
				}
			}
		})
	}
}

func TestChartRights(t *testing.T) {
	t.Parallel()
	least := []string{"BPF", "NET_ADMIN", "PERFMON", "NET_BIND_SERVICE"}
	need := append(slices.Clone(least), "SYS_ADMIN")
	tests := map[string]struct {
		args []string
		add  []string
		init int
	}{
		"defaults":       {nil, need, 1},
		"bpffs is there": {[]string{"--set", "agent.bpffs.mount=false"}, need, 0},
		"no SYS_ADMIN":   {[]string{"--set", "agent.capabilities.sysAdmin=false"}, least, 1},
	}
	for name, tc := range tests {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			objects := render(t, tc.args...)
			pod := objects["DaemonSet isthmus-agent"].Spec.Template.Spec
			if !pod.HostNetwork || pod.HostPID || len(pod.Containers) != 1 || len(pod.InitContainers) != tc.init {
				t.Fatalf("agent pod: %+v", pod)
			}
			agent := pod.Containers[0].SecurityContext
			if agent.Privileged || agent.AllowPrivilegeEscalation == nil || *agent.AllowPrivilegeEscalation || !agent.ReadOnlyRootFilesystem {
				t.Errorf("agent: %+v", agent)
			}
			if diff := cmp.Diff([]string{"ALL"}, agent.Capabilities.Drop); diff != "" {
				t.Errorf("capabilities dropped (-want +have):\n%s", diff)
			}
			if diff := cmp.Diff(tc.add, agent.Capabilities.Add); diff != "" {
				t.Errorf("capabilities added (-want +have):\n%s", diff)
			}
			for _, mount := range pod.Containers[0].VolumeMounts {
				if mount.MountPropagation == "Bidirectional" {
					t.Errorf("agent mounts %s for the node", mount.MountPath)
				}
				if mount.Name != "bpffs" && mount.Name != "state" && !mount.ReadOnly {
					t.Errorf("agent may write to %s", mount.MountPath)
				}
			}
			if sees := slices.Contains(pod.Containers[0].Args, "--netns=/host/netns"); sees != slices.Contains(tc.add, "SYS_ADMIN") {
				t.Errorf("agent looks for network namespaces: %v", sees)
			}
			controller := objects["Deployment isthmus-controller"].Spec.Template.Spec
			if controller.HostNetwork || len(controller.InitContainers) > 0 || controller.Containers[0].SecurityContext.Privileged ||
				len(controller.Containers[0].SecurityContext.Capabilities.Add) > 0 {
				t.Errorf("controller pod: %+v", controller)
			}
			for _, r := range objects["ClusterRole isthmus-agent"].Rules {
				if slices.Equal(r.Resources, []string{"tokenreviews"}) || slices.Equal(r.Resources, []string{"subjectaccessreviews"}) {
					continue // creating one asks a question
				}
				for _, verb := range r.Verbs {
					if !slices.Contains([]string{"get", "list", "watch"}, verb) {
						t.Errorf("agent may %s %v", verb, r.Resources)
					}
				}
			}
			writes := map[string][]string{}
			for _, r := range objects["Role isthmus-agent"].Rules {
				for _, resource := range r.Resources {
					writes[resource] = append(writes[resource], r.Verbs...)
				}
			}
			if diff := cmp.Diff(map[string][]string{"members": {"get"}, "nodereports": {"create", "get", "patch"}}, writes); diff != "" {
				t.Errorf("rights of the agent in its namespace (-want +have):\n%s", diff)
			}
			if len(objects["ClusterRole isthmus-controller"].Rules) == 0 {
				t.Error("the controller's role is empty")
			}
		})
	}
}

// With default values the node chooses the registry of the images.
func TestChartNamesNoHost(t *testing.T) {
	t.Parallel()
	var images []string
	for _, o := range render(t) {
		for _, c := range append(o.Spec.Template.Spec.InitContainers, o.Spec.Template.Spec.Containers...) {
			images = append(images, c.Image)
		}
	}
	slices.Sort(images)
	if diff := cmp.Diff([]string{"isthmus/agent:dev", "isthmus/agent:dev", "isthmus/controller:dev"}, images); diff != "" {
		t.Errorf("images (-want +have):\n%s", diff)
	}
	for name, o := range render(t, "--set", "image.registry=example.org/mirror,image.tag=v1") {
		for _, c := range o.Spec.Template.Spec.Containers {
			if !strings.HasPrefix(c.Image, "example.org/mirror/isthmus/") || !strings.HasSuffix(c.Image, ":v1") {
				t.Errorf("%s: image %s ignores registry and tag", name, c.Image)
			}
		}
	}
}

// Each value of the name server becomes a flag. A value that the profile decides becomes none.
func TestChartDNS(t *testing.T) {
	t.Parallel()
	defaults := []string{"--dns-ttl=5", "--dns-neighbour-port=53", "--dns-zone-file=/var/lib/isthmus/zone"}
	tests := map[string]struct {
		set     []string
		want    []string
		service bool
	}{
		"defaults": {nil, defaults, true},
		"everything": {
			[]string{
				"profile=lighthouse", "emptyHeadless=nxdomain", "clusterScoped=false", "ttl=0", "neighbourPort=5353", "service=false",
				"listen={192.0.2.1,192.0.2.1:5353}", "reverse={243.0.0.0/8}", "stateDir=", "clusterDNS=10.96.0.10", "queryLog=10000000", "fastPath={10.96.0.10}",
				"allow={203.0.113.0/24}", "externalClients.listen={192.0.2.53}", "externalClients.allow={198.51.100.0/24}",
			},
			[]string{
				"--dns-profile=lighthouse", "--dns-empty-headless=nxdomain", "--dns-cluster-scoped=false", "--dns-ttl=0", "--dns-neighbour-port=5353",
				"--dns-listen=192.0.2.1", "--dns-listen=192.0.2.1:5353", "--dns-allow=203.0.113.0/24", "--dns-external-listen=192.0.2.53", "--dns-external-allow=198.51.100.0/24", "--dns-reverse=243.0.0.0/8", "--dns-fast-path=10.96.0.10", "--dns-query-log=10000000", "--cluster-dns=10.96.0.10",
			},
			false,
		},
	}
	for name, tc := range tests {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			var args []string
			for _, s := range tc.set {
				args = append(args, "--set", "agent.dns."+s)
			}
			objects := render(t, args...)
			var have []string
			for _, flag := range objects["DaemonSet isthmus-agent"].Spec.Template.Spec.Containers[0].Args {
				if strings.HasPrefix(flag, "--dns-") || strings.HasPrefix(flag, "--cluster-dns") {
					have = append(have, flag)
				}
			}
			if diff := cmp.Diff(tc.want, have); diff != "" {
				t.Errorf("flags (-want +have):\n%s", diff)
			}
			if _, ok := objects["Service isthmus-dns"]; ok != tc.service {
				t.Errorf("Service isthmus-dns: %t, want %t", ok, tc.service)
			}
		})
	}
}

// Agents serve the objects of Isthmus unless they are told otherwise.
func TestChartImports(t *testing.T) {
	t.Parallel()
	for set, want := range map[string][]string{
		"agent.imports=isthmus": nil,
		"agent.imports=isthmus,agent.clusterSetIPRanges={243.0.0.0/8}":           {"--clusterset-ip-range=243.0.0.0/8"},
		"agent.imports=any,agent.clusterSetIPRanges={243.0.0.0/8,fd00:243::/48}": {"--imports=any", "--clusterset-ip-range=243.0.0.0/8", "--clusterset-ip-range=fd00:243::/48"},
	} {
		var have []string
		for _, flag := range render(t, "--set", set)["DaemonSet isthmus-agent"].Spec.Template.Spec.Containers[0].Args {
			if strings.HasPrefix(flag, "--imports") || strings.HasPrefix(flag, "--clusterset-ip-range") {
				have = append(have, flag)
			}
		}
		if diff := cmp.Diff(want, have); diff != "" {
			t.Errorf("--set %s: flags (-want +have):\n%s", set, diff)
		}
	}
}

// The gateway controller uses the slices of Isthmus unless it is told otherwise.
func TestChartGatewayImports(t *testing.T) {
	t.Parallel()
	for set, want := range map[string][]string{"replicas=1": nil, "imports=isthmus": nil, "imports=any": {"--imports=any"}} {
		var have []string
		for _, flag := range render(t, "--set", "gatewayController.enabled=true,gatewayController."+set)["Deployment isthmus-gateway-controller"].Spec.Template.Spec.Containers[0].Args {
			if strings.HasPrefix(flag, "--imports") {
				have = append(have, flag)
			}
		}
		if diff := cmp.Diff(want, have); diff != "" {
			t.Errorf("--set gatewayController.%s: flags (-want +have):\n%s", set, diff)
		}
	}
}

// Only a cluster of a federation may write Services, and gets the credentials of its clouds.
func TestChartMachines(t *testing.T) {
	t.Parallel()
	if _, ok := render(t)["ClusterRole isthmus-machines"]; ok {
		t.Error("the role exists without a federation")
	}
	objects := render(t, "--set", "controller.federation.enabled=true,controller.federation.cloudsSecret=clouds,controller.federation.machines.clouds[0].name=east")
	pod := objects["Deployment isthmus-controller"].Spec.Template.Spec
	for _, flag := range []string{"--federation", "--machines=/etc/isthmus/machines/machines.yaml", "--clouds=/etc/isthmus/clouds/clouds.yaml"} {
		if !slices.Contains(pod.Containers[0].Args, flag) {
			t.Errorf("flags %v lack %s", pod.Containers[0].Args, flag)
		}
	}
	for _, o := range []string{"ClusterRole isthmus-machines", "ClusterRoleBinding isthmus-machines", "ConfigMap isthmus-machines"} {
		if _, ok := objects[o]; !ok {
			t.Errorf("there is no %s", o)
		}
	}
}

// The chart installs the gateway controller on request, with its settings and with no more rights than it needs.
func TestChartGateway(t *testing.T) {
	t.Parallel()
	const name = "isthmus-gateway-controller"
	if _, ok := render(t)["Deployment "+name]; ok {
		t.Error("the chart installs it unasked")
	}
	objects := render(t, "--set", "gatewayController.enabled=true,gatewayController.settings.cluster=east,gatewayController.cloudsSecret=clouds,gatewayController.cloud=lbaas")
	pod := objects["Deployment "+name].Spec.Template.Spec
	if len(pod.Containers) != 1 || pod.HostNetwork || len(pod.Containers[0].SecurityContext.Capabilities.Add) > 0 || !pod.Containers[0].SecurityContext.ReadOnlyRootFilesystem {
		t.Fatalf("pod: %+v", pod)
	}
	for _, flag := range []string{"--clouds=/etc/isthmus/gateway/clouds/clouds.yaml", "--cloud=lbaas"} {
		if !slices.Contains(pod.Containers[0].Args, flag) {
			t.Errorf("flags %v lack %s", pod.Containers[0].Args, flag)
		}
	}
	if _, ok := objects["ConfigMap "+name]; !ok {
		t.Error("its settings are missing")
	}
	p := objects["NetworkPolicy "+name].Spec
	if !slices.Equal(p.PolicyTypes, []string{"Ingress", "Egress"}) || len(p.Ingress) != 1 || p.Ingress[0].Ports[0].Port != 9472 || len(p.Egress) != 1 {
		t.Fatalf("the network policy: %+v", p)
	}
	out := []port{{"UDP", 53, 0}, {"TCP", 53, 0}, {"TCP", 443, 0}, {"TCP", 6443, 0}, {"TCP", 9479, 0}, {"TCP", 5000, 0}, {"TCP", 9696, 0}}
	if diff := cmp.Diff(out, p.Egress[0].Ports); diff != "" {
		t.Errorf("egress ports (-want +have):\n%s", diff)
	}
	ports := render(t, "--set", "gatewayController.enabled=true,gatewayController.networkPolicy.ports={8443,30000-32767}")
	if diff := cmp.Diff([]port{{"UDP", 53, 0}, {"TCP", 53, 0}, {"TCP", 8443, 0}, {"TCP", 30000, 32767}}, ports["NetworkPolicy "+name].Spec.Egress[0].Ports); diff != "" {
		t.Errorf("egress ports, set by hand (-want +have):\n%s", diff)
	}
	closed := render(t, "--set-json", `gatewayController={"enabled":true,"networkPolicy":{"egress":[{"ports":[{"port":8443,"protocol":"TCP"}]}]}}`)
	if p := closed["NetworkPolicy "+name].Spec; len(p.Egress) != 1 || !slices.Equal(p.Egress[0].Ports, []port{{"TCP", 8443, 0}}) {
		t.Errorf("the network policy with egress rules set by hand: %+v", p)
	}
	secrets := func(objects map[string]object) (named []string) {
		for key, o := range objects {
			for _, r := range o.Rules {
				if strings.HasSuffix(key, " "+name) && slices.Contains(r.Resources, "secrets") {
					named = append(named, fmt.Sprintf("%s %v %v", key, r.Verbs, r.ResourceNames))
				}
			}
		}
		return named
	}
	if may := secrets(objects); len(may) > 0 {
		t.Errorf("without a named Secret it may %v", may)
	}
	with := render(t, "--set", "gatewayController.enabled=true,gatewayController.passwordSecrets={router-1,router-2}")
	if diff := cmp.Diff([]string{"Role " + name + " [get] [router-1 router-2]"}, secrets(with)); diff != "" {
		t.Errorf("rights to Secrets (-want +have):\n%s", diff)
	}
	for gateways, may := range map[string]string{"false": "certs", "true": "certs isthmus-gateways"} {
		renews := render(t, "--set", "gatewayController.enabled=true,gatewayController.authoritySecret=authority,gatewayController.certsSecret=certs,gateway.cluster=east,gateway.enabled="+gateways)
		want := []string{"Role " + name + " [get] [authority]", "Role " + name + " [get update] [" + may + "]"}
		if diff := cmp.Diff(want, secrets(renews)); diff != "" {
			t.Errorf("rights to Secrets of certificates (-want +have):\n%s", diff)
		}
		args := renews["Deployment "+name].Spec.Template.Spec.Containers[0].Args
		for secret := range strings.FieldsSeq(may) {
			if !slices.Contains(args, "--renew-secret="+secret) || !slices.Contains(args, "--authority-secret=authority") {
				t.Errorf("the arguments are %v", args)
			}
		}
	}
	may := map[string][]string{}
	for _, kind := range []string{"ClusterRole ", "Role "} {
		for _, r := range objects[kind+name].Rules {
			for _, resource := range r.Resources {
				for _, verb := range r.Verbs {
					if !slices.Contains([]string{"get", "list", "watch"}, verb) {
						may[resource] = append(may[resource], verb)
					}
				}
			}
		}
	}
	want := map[string][]string{
		"events": {"create", "patch", "create", "patch"}, "leases": {"create", "update"},
		"services": {"patch"}, "services/status": {"patch"}, "gatewaynodes": {"patch"}, "gatewaynodes/status": {"patch"},
		"tokenreviews": {"create"}, "subjectaccessreviews": {"create"},
	}
	if diff := cmp.Diff(want, may); diff != "" {
		t.Errorf("rights to write (-want +have):\n%s", diff)
	}
}

// By default all programs serve HTTPS, kubelets probe it, and an account needs the right to /metrics. ServiceMonitors send the token of
// Prometheus. Plain HTTP is a choice.
func TestChartMetrics(t *testing.T) {
	t.Parallel()
	const programs = "gatewayController.enabled=true,gateway.enabled=true,gateway.cluster=east"
	const monitors = "metrics.serviceMonitor.enabled=true,metrics.serviceMonitor.labels.release=prometheus,metrics.readers[0].name=prometheus,metrics.readers[0].namespace=monitoring"
	text := func(set string) string {
		t.Helper()
		return rendered(t, "--set", programs+","+set)
	}
	for name, c := range map[string]struct {
		set      string
		has, not []string
	}{
		"by default": {
			"log.format=text",
			[]string{"nonResourceURLs: [/metrics]", "name: isthmus-metrics-reader", "{name: https, containerPort: 9470}", "path: /readyz, port: https, scheme: HTTPS}"},
			[]string{"insecure-http", "port: http,", "name: http,", "ServiceMonitor", "kind: Service\nmetadata:\n  name: isthmus-agent-metrics"},
		},
		"with the Operator": {
			monitors,
			[]string{
				"kind: ServiceMonitor\nmetadata:\n  name: isthmus-agent", "name: isthmus-controller-metrics", "name: isthmus-gateway-controller-metrics", "release: prometheus",
				"scheme: https", "bearerTokenFile: /var/run/secrets/kubernetes.io/serviceaccount/token", "tlsConfig: {insecureSkipVerify: true}",
				"{kind: ServiceAccount, name: prometheus, namespace: monitoring}",
			},
			[]string{"insecure-http", "scheme: http\n"},
		},
		"plain HTTP": {
			monitors + ",metrics.insecureHTTP=true",
			[]string{"- --insecure-http", "{name: http, containerPort: 9471}", "path: /healthz, port: http, scheme: HTTP}", "scheme: http\n", "host: \"127.0.0.1\"}"},
			[]string{"bearerTokenFile", "{name: https, containerPort: 9470}"},
		},
	} {
		have := text(c.set)
		for _, want := range c.has {
			if !strings.Contains(have, want) {
				t.Errorf("%s: the chart lacks %q", name, want)
			}
		}
		for _, no := range c.not {
			if strings.Contains(have, no) {
				t.Errorf("%s: the chart has %q", name, no)
			}
		}
	}
	if n := strings.Count(text("metrics.insecureHTTP=true"), "- --insecure-http"); n != 3 {
		t.Errorf("%d programs serve plain HTTP, want agent, controller and gateway controller", n)
	}
}

// The chart installs gateways on request. Each has its own certificate, no right at the API server and few on its node, and
// time to tell its neighbours before it ends. An update replaces them one at a time.
func TestChartGatewayNodes(t *testing.T) {
	t.Parallel()
	const name = "isthmus-gateway"
	if _, ok := render(t)["DaemonSet "+name]; ok {
		t.Error("the chart installs it unasked")
	}
	const on = "gateway.enabled=true,gateway.cluster=east"
	tests := map[string]struct {
		set   string
		add   []string
		paths []string // on the node
		flags []string
		init  int
		probe string
	}{
		"ebpf": {
			on,
			[]string{"NET_ADMIN", "SYS_ADMIN", "NET_RAW", "SYS_NICE"},
			[]string{"/var/lib/isthmus-gateway", "/run/isthmus-gateway", "/sys/fs/bpf"},
			[]string{"--cluster=east", "--balancer=ebpf", "--bpffs=/host/sys/fs/bpf", "--xdp=off", "--flows=131072", "--http-listen=127.0.0.1:9444"},
			1, "127.0.0.1",
		},
		"ebpf, and no VRRP": {
			on + ",gateway.capabilities.netRaw=false,gateway.xdp=auto,gateway.flows=2000000,gateway.devices={eth1},agent.bpffs.mount=false,gateway.http.host=::1",
			[]string{"NET_ADMIN", "SYS_ADMIN", "SYS_NICE"},
			[]string{"/var/lib/isthmus-gateway", "/run/isthmus-gateway", "/sys/fs/bpf"},
			[]string{"--xdp=auto", "--flows=2000000", "--device=eth1", "--http-listen=[::1]:9444"},
			0, "::1",
		},
		"nftables": {
			on + ",gateway.balancer=nftables,gateway.capabilities.sysNice=false,gateway.http.host=0.0.0.0,gateway.stateDir=/srv/g",
			[]string{"NET_ADMIN", "NET_RAW"},
			[]string{"/srv/g", "/run/isthmus-gateway"},
			[]string{"--balancer=nftables", "--state-dir=/srv/g", "--http-listen=0.0.0.0:9444"},
			0, "",
		},
	}
	for about, tc := range tests {
		t.Run(about, func(t *testing.T) {
			t.Parallel()
			objects := render(t, "--set", tc.set)
			set := objects["DaemonSet "+name].Spec
			if s := set.UpdateStrategy; s.Type != "RollingUpdate" || s.RollingUpdate.MaxUnavailable != 1 || set.MinReadySeconds != 15 {
				t.Errorf("update strategy: %+v, after %d s", s, set.MinReadySeconds)
			}
			pod := set.Template.Spec
			if !pod.HostNetwork || pod.HostPID || len(pod.Containers) != 1 || len(pod.InitContainers) != tc.init {
				t.Fatalf("pod: %+v", pod)
			}
			if _, ok := pod.NodeSelector["isthmus.dev/gateway"]; !ok || len(pod.NodeSelector) != 2 || pod.NodeSelector["kubernetes.io/os"] != "linux" {
				t.Errorf("on nodes with %v", pod.NodeSelector)
			}
			if pod.TerminationGracePeriodSeconds <= 20 { // closeTimeout of the program
				t.Errorf("neighbours have %d s to choose another next hop", pod.TerminationGracePeriodSeconds)
			}
			if pod.AutomountServiceAccountToken == nil || *pod.AutomountServiceAccountToken {
				t.Error("it has a token of the API server")
			}
			for key, o := range objects {
				if strings.HasSuffix(key, " "+name) && len(o.Rules) > 0 {
					t.Errorf("%s gives it %v", key, o.Rules)
				}
			}
			gateway := pod.Containers[0]
			if c := gateway.SecurityContext; c.Privileged || c.AllowPrivilegeEscalation == nil || *c.AllowPrivilegeEscalation || !c.ReadOnlyRootFilesystem || !slices.Equal(c.Capabilities.Drop, []string{"ALL"}) {
				t.Errorf("gateway: %+v", c)
			}
			if diff := cmp.Diff(tc.add, gateway.SecurityContext.Capabilities.Add); diff != "" {
				t.Errorf("capabilities added (-want +have):\n%s", diff)
			}
			for _, flag := range append(tc.flags, "--listen=:9479", "--cert=/etc/isthmus-gateway/$(NODE_NAME).crt", "--key=/etc/isthmus-gateway/$(NODE_NAME).key", "--ca=/etc/isthmus-gateway/ca.crt") {
				if !slices.Contains(gateway.Args, flag) {
					t.Errorf("flags %v lack %s", gateway.Args, flag)
				}
			}
			var paths []string
			for _, v := range pod.Volumes {
				switch {
				case v.HostPath != nil:
					paths = append(paths, v.HostPath.Path)
				case v.Secret == nil || v.Secret.SecretName != "isthmus-gateways":
					t.Errorf("volume %+v", v)
				}
			}
			if diff := cmp.Diff(tc.paths, paths); diff != "" {
				t.Errorf("paths of its node (-want +have):\n%s", diff)
			}
			for _, mount := range gateway.VolumeMounts {
				if mount.MountPropagation == "Bidirectional" || (mount.Name == "certs") != mount.ReadOnly {
					t.Errorf("mount %+v", mount)
				}
			}
			if gateway.LivenessProbe.HTTPGet.Host != tc.probe || gateway.ReadinessProbe.HTTPGet.Host != tc.probe || gateway.ReadinessProbe.HTTPGet.Path != "/readyz" {
				t.Errorf("probes: %+v, %+v, want host %q", gateway.LivenessProbe, gateway.ReadinessProbe, tc.probe)
			}
		})
	}
}

// A gateway on a node finds its certificate in a Secret of its own, as cert-manager writes it, and the controller does not renew that.
func TestChartNodeCertificates(t *testing.T) {
	t.Parallel()
	objects := render(t, "--set", "gateway.enabled=true,gateway.cluster=east,gateway.nodeCertificates={node-1,node-2},gatewayController.enabled=true,gatewayController.authoritySecret=authority")
	var files []string
	for _, v := range objects["DaemonSet "+"isthmus-gateway"].Spec.Template.Spec.Volumes {
		if v.Secret != nil {
			t.Errorf("it mounts Secret %s", v.Secret.SecretName)
		}
		if v.Projected == nil {
			continue
		}
		for _, s := range v.Projected.Sources {
			for _, i := range s.Secret.Items {
				files = append(files, i.Path+" = "+s.Secret.Name+"/"+i.Key)
			}
		}
	}
	want := []string{
		"ca.crt = isthmus-gateway-node-1/ca.crt", "node-1.crt = isthmus-gateway-node-1/tls.crt", "node-1.key = isthmus-gateway-node-1/tls.key",
		"node-2.crt = isthmus-gateway-node-2/tls.crt", "node-2.key = isthmus-gateway-node-2/tls.key",
	}
	if diff := cmp.Diff(want, files); diff != "" {
		t.Errorf("files (-want +have):\n%s", diff)
	}
	if args := objects["Deployment "+"isthmus-gateway-controller"].Spec.Template.Spec.Containers[0].Args; slices.Contains(args, "--renew-secret=isthmus-gateways") {
		t.Errorf("the controller renews a Secret that gateways do not use: %v", args)
	}
}
