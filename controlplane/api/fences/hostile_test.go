package fences_test

import (
	"context"
	"os"
	"regexp"
	"testing"

	appsv1 "k8s.io/api/apps/v1"
	authenticationv1 "k8s.io/api/authentication/v1"
	authorizationv1 "k8s.io/api/authorization/v1"
	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	eventsv1 "k8s.io/api/events/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/isthmus-net/isthmus/bpf/lb"
	"github.com/isthmus-net/isthmus/controlplane/api/about"
	federation "github.com/isthmus-net/isthmus/controlplane/api/federation/v1alpha1"
	isthmus "github.com/isthmus-net/isthmus/controlplane/api/v1alpha1"
	gateway "github.com/isthmus-net/isthmus/gateway/api/v1alpha1"
	gatewayservice "github.com/isthmus-net/isthmus/gateway/service"
)

// A tenant with every right in her namespace writes labels, annotations and objects that are reserved. Each attempt is refused
// with its reason, and nothing changes.
func TestHostileTenant(t *testing.T) {
	w := newTestbed(t)
	imported := serviceImport("imported", labels(managedBy, isthmus.ManagedBy))
	importedSlice := slice("imported", labels(sliceManagedBy, isthmus.ManagedBy, isthmus.LabelCluster, "b"), annotations(isthmus.AnnotationChangedAt, "1"))
	federated := service("federated", labels(managedBy, federation.ManagedBy), annotations(federation.AnnotationEpoch, "3"))
	machines := service("machines", labels(managedBy, federation.ManagedByMachines))
	copied := networkPolicy("copied", labels(managedBy, federation.ManagedBy))
	plain, plainSlice, plainImport := service("plain"), slice("plain"), serviceImport("plain")
	balanced := balancer("balanced", annotations("gateway.isthmus.dev/own-external-ips", "192.0.2.9"))
	own := export("own")
	for _, o := range []client.Object{imported, importedSlice, federated, machines, copied, plain, plainSlice, plainImport, balanced, own} {
		w.put(o)
	}
	w.run(t, map[string]attack{
		// She poses as our controller.
		"an import of ours":                     {do: create(serviceImport("x", labels(managedBy, "isthmus.dev"))), because: "label app.kubernetes.io/managed-by=isthmus.dev marks objects of Isthmus"},
		"an import of the federation":           {do: create(serviceImport("x", labels(managedBy, "federation.isthmus.dev"))), because: "managed-by=federation.isthmus.dev marks"},
		"an import with the mark of a slice":    {do: create(serviceImport("x", labels(sliceManagedBy, "federation.isthmus.dev"))), because: "endpointslice.kubernetes.io/managed-by=federation.isthmus.dev marks"},
		"an import of ours, applied":            {do: apply(typed(serviceImport("x", labels(managedBy, "isthmus.dev")))), because: "managed-by=isthmus.dev marks"},
		"her import becomes ours":               {do: merge(plainImport, `{"metadata":{"labels":{"app.kubernetes.io/managed-by":"isthmus.dev"}}}`), because: "managed-by=isthmus.dev marks"},
		"a slice of ours":                       {do: create(slice("x", labels(sliceManagedBy, "isthmus.dev"))), because: "endpointslice.kubernetes.io/managed-by=isthmus.dev marks"},
		"a slice of machines":                   {do: create(slice("x", labels(sliceManagedBy, "machines.federation.isthmus.dev"))), because: "managed-by=machines.federation.isthmus.dev marks"},
		"a slice of a later kind of ours":       {do: create(slice("x", labels(sliceManagedBy, "later.isthmus.dev"))), because: "managed-by=later.isthmus.dev marks"},
		"her slice becomes ours":                {do: merge(plainSlice, `{"metadata":{"labels":{"endpointslice.kubernetes.io/managed-by":"isthmus.dev"}}}`), because: "managed-by=isthmus.dev marks"},
		"a slice of member b":                   {do: create(slice("x", labels(isthmus.LabelCluster, "b"))), because: "label isthmus.dev/cluster is reserved"},
		"a slice of an exported Service":        {do: create(slice("x", labels(isthmus.LabelServiceName, "y", isthmus.LabelServiceNamespace, "z"))), because: "isthmus.dev/service-name"},
		"a slice with a time of change":         {do: create(slice("x", annotations(isthmus.AnnotationChangedAt, "1"))), because: "annotation isthmus.dev/changed-at is reserved"},
		"a slice of a cloud":                    {do: create(slice("x", labels("federation.isthmus.dev/cloud", "west"))), because: "label federation.isthmus.dev/cloud is reserved"},
		"a slice with a source":                 {do: create(slice("x", annotations("federation.isthmus.dev/source", "shop/y"))), because: "annotation federation.isthmus.dev/source is reserved"},
		"a Service of the federation":           {do: create(service("x", labels(managedBy, "federation.isthmus.dev"))), because: "marks objects of Isthmus"},
		"a Service of machines":                 {do: create(service("x", labels(managedBy, "machines.federation.isthmus.dev"))), because: "marks objects of Isthmus"},
		"her Service, federated":                {do: merge(plain, `{"metadata":{"labels":{"app.kubernetes.io/managed-by":"federation.isthmus.dev"}}}`), because: "marks objects of Isthmus"},
		"a Service with an epoch":               {do: create(service("x", annotations(federation.AnnotationEpoch, "9"))), because: "annotation federation.isthmus.dev/epoch is reserved"},
		"a Service with a status":               {do: create(service("x", annotations(federation.AnnotationServiceStatus, "all is well"))), because: "service-status is reserved"},
		"a Service with carried annotations":    {do: create(service("x", annotations("federation.isthmus.dev/from-machines", "a"))), because: "from-machines is reserved"},
		"a Service with a label of ours":        {do: create(service("x", labels("isthmus.dev/anything", "a"))), because: "label isthmus.dev/anything is reserved"},
		"a request as a label":                  {do: create(service("x", labels("isthmus.dev/service-import", "a"))), because: "label isthmus.dev/service-import is reserved"},
		"a Service's status, with a label":      {do: mergeStatus(plain, `{"metadata":{"labels":{"isthmus.dev/cluster":"b"}}}`), because: "label isthmus.dev/cluster is reserved"},
		"a policy of the federation":            {do: create(networkPolicy("x", labels(managedBy, "federation.isthmus.dev"))), because: "marks objects of Isthmus"},
		"a policy with a status":                {do: create(networkPolicy("x", annotations(federation.AnnotationPolicyStatus, "applied"))), because: "policy-status is reserved"},
		"Endpoints, whose labels slices get":    {do: create(endpoints("x", labels(isthmus.LabelCluster, "b"))), because: "label isthmus.dev/cluster is reserved"},
		"an export with a label of ours":        {do: create(export("x", labels(isthmus.LabelCluster, "b"))), because: "label isthmus.dev/cluster is reserved"},
		"an export with an annotation":          {do: create(export("x", annotations(isthmus.AnnotationChangedAt, "1"))), because: "annotation isthmus.dev/changed-at is reserved"},
		"an export's annotation, later":         {do: merge(own, `{"metadata":{"annotations":{"isthmus.dev/changed-at":"1"}}}`), because: "annotation isthmus.dev/changed-at is reserved"},
		"externalIPs of the gateway controller": {do: create(service("x", annotations("gateway.isthmus.dev/own-external-ips", "192.0.2.1"))), because: "own-external-ips is reserved"},
		"other externalIPs of the controller":   {do: merge(balanced, `{"metadata":{"annotations":{"gateway.isthmus.dev/own-external-ips":"192.0.2.1"}}}`), because: "own-external-ips is reserved"},
		"no externalIPs of the controller":      {do: merge(balanced, `{"metadata":{"annotations":{"gateway.isthmus.dev/own-external-ips":null}}}`), because: "own-external-ips is reserved"},

		// She changes what we wrote.
		"our import leads elsewhere":          {do: merge(imported, `{"spec":{"ips":["10.96.0.1"]}}`), because: "only the accounts of Isthmus may change it"},
		"our import, of other clusters":       {do: mergeStatus(imported, `{"status":{"clusters":[{"cluster":"evil"}]}}`), because: "only the accounts of Isthmus may change it"},
		"our import loses its mark":           {do: merge(imported, `{"metadata":{"labels":{"app.kubernetes.io/managed-by":null}}}`), because: "only its accounts may set, change or remove it"},
		"our import, deleted":                 {do: remove(imported), because: "only the accounts of Isthmus may delete it"},
		"all imports, deleted":                {do: removeAll(imported), because: "only the accounts of Isthmus may delete it"},
		"our slice leads elsewhere":           {do: merge(importedSlice, `{"endpoints":[{"addresses":["10.9.9.9"]}]}`), because: "only the accounts of Isthmus may change it"},
		"our slice has other ports":           {do: merge(importedSlice, `{"ports":[{"port":1}]}`), because: "only the accounts of Isthmus may change it"},
		"our slice, of another member":        {do: merge(importedSlice, `{"metadata":{"labels":{"isthmus.dev/cluster":"c"}}}`), because: "label isthmus.dev/cluster is reserved"},
		"our slice, without a member":         {do: merge(importedSlice, `{"metadata":{"labels":{"isthmus.dev/cluster":null}}}`), because: "label isthmus.dev/cluster is reserved"},
		"our slice, of Kubernetes":            {do: merge(importedSlice, `{"metadata":{"labels":{"endpointslice.kubernetes.io/managed-by":"endpointslice-controller.k8s.io"}}}`), because: "only its accounts may set, change or remove it"},
		"our slice, deleted":                  {do: remove(importedSlice), because: "only the accounts of Isthmus may delete it"},
		"a federated Service selects pods":    {do: merge(federated, `{"spec":{"selector":{"app":"evil"}}}`), because: "only the accounts of Isthmus may change it"},
		"a federated Service, deleted":        {do: remove(federated), because: "only the accounts of Isthmus may delete it"},
		"a federated Service of a late epoch": {do: merge(federated, `{"metadata":{"annotations":{"federation.isthmus.dev/epoch":"999999999"}}}`), because: "annotation federation.isthmus.dev/epoch is reserved"},
		"a Service of machines, changed":      {do: merge(machines, `{"spec":{"ports":[{"port":81}]}}`), because: "only the accounts of Isthmus may change it"},
		"a copied policy, changed":            {do: merge(copied, `{"spec":{"podSelector":{"matchLabels":{"a":"b"}}}}`), because: "only the accounts of Isthmus may change it"},
		"a copied policy, deleted":            {do: remove(copied), because: "only the accounts of Isthmus may delete it"},

		// She borrows names and rights.
		"as another namespace's member of a broker": {as: member, do: create(slice("x", labels(isthmus.LabelCluster, "b"))), because: "label isthmus.dev/cluster is reserved"},
	}, tenant)
}

// Requests of users stay free, and so do the accounts of Isthmus, Kubernetes and administrators.
func TestReservedLabelsLeaveRequests(t *testing.T) {
	w := newTestbed(t)
	imported := serviceImport("imported", labels(managedBy, isthmus.ManagedBy))
	federated := service("federated", labels(managedBy, federation.ManagedBy), annotations(federation.AnnotationEpoch, "3"))
	importedSlice := slice("imported", labels(sliceManagedBy, isthmus.ManagedBy))
	for _, o := range []client.Object{imported, federated, importedSlice} {
		w.put(o)
	}
	all := map[string]permitted{
		"a tenant's import":                 {tenant, create(serviceImport("x"))},
		"a tenant's slice":                  {tenant, create(slice("x", labels(sliceManagedBy, "jane.example.org")))},
		"a tenant's Service of Helm":        {tenant, create(service("x", labels(managedBy, "Helm")))},
		"a look-alike domain":               {tenant, create(service("x", labels("notisthmus.dev/cluster", "b", managedBy, "notisthmus.dev")))},
		"a tenant's notes on ours":          {tenant, merge(federated, `{"metadata":{"annotations":{"example.org/note":"x","external-dns.alpha.kubernetes.io/hostname":"shop.example.org"}}}`)},
		"a tenant's request on ours":        {tenant, merge(imported, `{"metadata":{"annotations":{"isthmus.dev/prefer":"zone"}}}`)},
		"the garbage collector":             {collector, remove(importedSlice)},
		"the endpoint slice controller":     {slicer, create(slice("x", labels(managedBy, isthmus.ManagedBy)))},
		"the controller's import":           {controller, create(serviceImport("x", labels(managedBy, isthmus.ManagedBy)))},
		"the controller's change":           {controller, merge(imported, `{"spec":{"ips":["243.0.0.2"]}}`)},
		"a supervisor":                      {supervisor, merge(federated, `{"metadata":{"annotations":{"federation.isthmus.dev/epoch":"4"}}}`)},
		"an administrator":                  {"", create(slice("x", labels(isthmus.LabelCluster, "b")))},
		"an administrator by RBAC alone":    {operator, merge(imported, `{"spec":{"ips":["243.0.0.2"]}}`)},
		"an administrator deletes":          {operator, remove(imported)},
		"a member of a broker in its place": {member, create(slice("x", in(broker), labels(isthmus.LabelCluster, "b", sliceManagedBy, isthmus.ManagedBy)))},
	}
	for _, key := range append(documentedRequests(t),
		lb.AnnotationPrefer, lb.AnnotationClusterWeights, lb.AnnotationBalancer, "isthmus.dev/restored",
		gatewayservice.AnnotationServiceImport, gatewayservice.AnnotationPort,
		federation.AnnotationPolicy, federation.AnnotationGlobalService, federation.AnnotationService, federation.AnnotationAskHostname,
		federation.AnnotationGlobalServiceAntrea, federation.AnnotationServiceAntreaTanzu, federation.MarkVirtualMachines,
	) {
		all["request "+key] = permitted{tenant, create(service("x", annotations(key, "x")))}
	}
	w.permit(t, all)
}

// documentedRequests returns the annotations that docs/gateway.md offers to the owners of Services.
func documentedRequests(t *testing.T) (keys []string) {
	t.Helper()
	page, err := os.ReadFile("../../../docs/gateway.md")
	if err != nil {
		t.Fatal(err)
	}
	for _, row := range regexp.MustCompile("(?m)^\\| `(gateway\\.isthmus\\.dev/[a-z-]+)` \\|").FindAllStringSubmatch(string(page), -1) {
		keys = append(keys, row[1])
	}
	if len(keys) < 9 {
		t.Fatalf("docs/gateway.md offers only the annotations %q", keys)
	}
	return keys
}

// A stolen token of the controller changes nothing that is not the controller's.
func TestStolenController(t *testing.T) {
	w := newTestbed(t)
	foreignImport, foreignSlice, victim := serviceImport("foreign"), slice("foreign", labels(sliceManagedBy, "endpointslice-controller.k8s.io")), service("victim")
	ours := slice("ours", labels(sliceManagedBy, isthmus.ManagedBy))
	machines := service("machines", labels(managedBy, federation.ManagedByMachines))
	exported := export("exported")
	id := &about.ClusterProperty{ObjectMeta: metav1.ObjectMeta{Name: "fences.example.org"}, Spec: about.ClusterPropertySpec{Value: "a"}}
	claim := &federation.ClusterClaim{ObjectMeta: metav1.ObjectMeta{Name: "fences.example.org"}, Spec: federation.ClusterClaimSpec{Name: "fences.example.org", Value: "a"}}
	secret := &corev1.Secret{ObjectMeta: metav1.ObjectMeta{Namespace: system, Name: "fences"}}
	account := &corev1.ServiceAccount{ObjectMeta: metav1.ObjectMeta{Namespace: system, Name: "fences"}}
	stripped := slice("stripped", annotations(isthmus.AnnotationChangedAt, "1")) // an administrator removed its label
	own := &corev1.Secret{                                                       // with the token for the broker
		ObjectMeta: metav1.ObjectMeta{Namespace: system, Name: isthmus.BrokerSecret},
		Data:       map[string][]byte{isthmus.BrokerSecretKubeconfig: []byte("k"), isthmus.BrokerSecretToken: []byte("t")},
	}
	elsewhere := &corev1.Secret{ObjectMeta: metav1.ObjectMeta{Namespace: shop, Name: isthmus.BrokerSecret}}
	credentials := &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: federation.SecretNamespace}}
	federated := &corev1.Secret{ // with a supervisor's token for member c
		ObjectMeta: metav1.ObjectMeta{Namespace: federation.SecretNamespace, Name: "federation-c"},
		Data:       map[string][]byte{federation.SecretToken: []byte("t"), federation.SecretCA: []byte("c"), federation.SecretCredential: []byte("s")},
	}
	for _, o := range []client.Object{foreignImport, foreignSlice, victim, ours, stripped, machines, exported, id, claim, secret, own, elsewhere, account, credentials, federated} {
		w.put(o)
	}
	selecting := service("x", labels(managedBy, federation.ManagedByMachines))
	selecting.Spec.Selector = map[string]string{"app": "evil"}
	external := service("x", labels(managedBy, federation.ManagedByMachines))
	external.Spec.ExternalIPs = []string{"10.96.0.1"}
	lease := func(namespace, name string) *coordinationv1.Lease {
		return &coordinationv1.Lease{ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: name}}
	}
	w.run(t, map[string]attack{
		"a foreign import, changed":        {do: merge(foreignImport, `{"spec":{"ips":["243.0.0.2"]}}`), because: "writes only ServiceImports with the label"},
		"a foreign import, taken":          {do: merge(foreignImport, `{"metadata":{"labels":{"app.kubernetes.io/managed-by":"isthmus.dev"}}}`), because: "this one has [none isthmus.dev]"},
		"a foreign import's status":        {do: mergeStatus(foreignImport, `{"status":{"clusters":[{"cluster":"evil"}]}}`), because: "writes only ServiceImports with the label"},
		"a foreign import, deleted":        {do: remove(foreignImport), because: "writes only ServiceImports with the label"},
		"an import without a label":        {do: create(serviceImport("x")), because: "this one has [none]"},
		"an import of the federation":      {do: create(serviceImport("x", labels(managedBy, federation.ManagedBy))), because: "this one has [federation.isthmus.dev]"},
		"a slice of Kubernetes":            {do: merge(foreignSlice, `{"endpoints":[{"addresses":["10.9.9.9"]}]}`), because: "this one has [endpointslice-controller.k8s.io endpointslice-controller.k8s.io]"},
		"a slice of Kubernetes, taken":     {do: merge(foreignSlice, `{"metadata":{"labels":{"endpointslice.kubernetes.io/managed-by":"isthmus.dev"}}}`), because: "this one has [endpointslice-controller.k8s.io isthmus.dev]"},
		"a slice without its label":        {do: merge(stripped, `{"endpoints":[{"addresses":["10.9.9.9"]}]}`), because: "this one has [isthmus.dev none]"},
		"a slice of Kubernetes, deleted":   {do: remove(foreignSlice), because: "writes only EndpointSlices with the label"},
		"all slices, deleted":              {do: removeAll(&discoveryv1.EndpointSlice{}), because: "writes only EndpointSlices with the label"},
		"a slice as Kubernetes makes them": {do: create(slice("x", labels(sliceManagedBy, "endpointslice-controller.k8s.io"))), because: "writes only EndpointSlices with the label"},
		"our slice, given away":            {do: merge(ours, `{"metadata":{"labels":{"endpointslice.kubernetes.io/managed-by":null}}}`), because: "this one has [isthmus.dev none]"},
		"our slice, for machines":          {do: merge(ours, `{"metadata":{"labels":{"endpointslice.kubernetes.io/managed-by":"machines.federation.isthmus.dev"}}}`), because: "and keeps it"},
		"machines in kube-system":          {do: create(slice("x", in("kube-system"), labels(sliceManagedBy, federation.ManagedByMachines))), because: "no Services of machines in namespaces kube-*"},
		"a user's Service":                 {do: merge(victim, `{"spec":{"externalIPs":["192.0.2.1"]}}`), because: "writes only Services with the label"},
		"a user's Service, taken":          {do: merge(victim, `{"metadata":{"labels":{"app.kubernetes.io/managed-by":"machines.federation.isthmus.dev"}}}`), because: "this one has [none machines.federation.isthmus.dev]"},
		"a user's Service, deleted":        {do: remove(victim), because: "writes only Services with the label"},
		"a user's Service's status":        {do: mergeStatus(victim, `{"status":{"conditions":[{"type":"x","status":"True","reason":"y","message":"","lastTransitionTime":"2026-01-01T00:00:00Z"}]}}`), because: "may not write /services/status"},
		"a Service without a label":        {do: create(service("x")), because: "writes only Services with the label"},
		"a Service that selects":           {do: create(selecting), because: "of type ClusterIP, without a selector"},
		"a Service with externalIPs":       {do: create(external), because: "without externalIPs"},
		"a Service of type ExternalName":   {do: merge(machines, `{"spec":{"type":"ExternalName","externalName":"evil.example.org"}}`), because: "of type ClusterIP"},
		"a load balancer":                  {do: create(balancer("x", labels(managedBy, federation.ManagedByMachines))), because: "of type ClusterIP"},
		"a Service in kube-system":         {do: create(service("x", in("kube-system"), labels(managedBy, federation.ManagedByMachines))), because: "in namespaces kube-*"},
		"an export":                        {do: create(export("x")), because: "may not write multicluster.x-k8s.io/serviceexports"},
		"an export, deleted":               {do: remove(exported), because: "may not write multicluster.x-k8s.io/serviceexports"},
		"a Lease of the scheduler":         {do: create(lease("kube-system", "kube-scheduler")), because: "renews only the Leases"},
		"the gateway controller's Lease":   {do: create(lease(system, "isthmus-gateway-controller")), because: "renews only the Leases"},
		"another Member's namespace": {do: create(&isthmus.Member{
			ObjectMeta: metav1.ObjectMeta{Namespace: shop, Name: "a"}, Spec: isthmus.MemberSpec{ClusterID: "a", ClusterSetID: "s", JoinTime: metav1.Now()},
		}), because: "writes only the Members of namespace isthmus-system"},
		"an administrator's id":     {do: merge(id, `{"spec":{"value":"b"}}`), because: "writes only ClusterProperties with the label"},
		"an administrator's claim":  {do: merge(claim, `{"spec":{"value":"b"}}`), because: "only creates ClusterClaims"},
		"a claim without a label":   {do: create(&federation.ClusterClaim{ObjectMeta: metav1.ObjectMeta{Name: "x"}, Spec: federation.ClusterClaimSpec{Name: "x", Value: "y"}}), because: "only creates ClusterClaims"},
		"a Federation":              {do: create(&federation.Federation{ObjectMeta: metav1.ObjectMeta{Name: federation.FederationName}, Spec: federation.FederationSpec{ClusterSet: "evil"}}), because: "may not write federation.isthmus.dev/federations"},
		"a Secret":                  {do: merge(secret, `{"stringData":{"token":"b"}}`), because: "changes only the token of Secret isthmus-system/isthmus-broker"},
		"a Secret of a tenant":      {do: merge(elsewhere, `{"stringData":{"token":"b"}}`), because: "changes only the token of Secret"},
		"another broker":            {do: merge(own, `{"stringData":{"kubeconfig":"b"}}`), because: "changes only the token of Secret"},
		"no broker":                 {do: merge(own, `{"data":{"kubeconfig":null}}`), because: "changes only the token of Secret"},
		"a key of others":           {do: merge(own, `{"stringData":{"a":"b"}}`), because: "changes only the token of Secret"},
		"a label of its Secret":     {do: merge(own, `{"metadata":{"labels":{"a":"b"}}}`), because: "changes only the token of Secret"},
		"its Secret, deleted":       {do: remove(own), because: "may not write /secrets"},
		"a member's certificates":   {do: merge(federated, `{"stringData":{"ca.crt":"b"}}`), because: "changes only the token of Secret"},
		"another binding":           {do: merge(federated, `{"stringData":{"credential":"b"}}`), because: "changes only the token of Secret"},
		"a member's token, deleted": {do: remove(federated), because: "may not write /secrets"},
		"another Secret":            {do: create(&corev1.Secret{ObjectMeta: metav1.ObjectMeta{Namespace: system, Name: "x"}}), because: "may not write /secrets"},
		"a ConfigMap":               {do: create(configMap("x")), because: "may not write /configmaps"},
		"a pod":                     {do: create(pod()), because: "may not write /pods"},
		"a Deployment":              {do: create(deployment()), because: "may not write apps/deployments"},
		"a namespace":               {do: create(&corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: "x"}}), because: "may not write /namespaces"},
		"a node":                    {do: create(&corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "x"}}), because: "may not write /nodes"},
		"more rights":               {do: create(moreRights()), because: "may not write rbac.authorization.k8s.io/clusterrolebindings"},
		"a token of another account": {do: func(ctx context.Context, c client.Client) error {
			return c.SubResource("token").Create(ctx, account, asToken())
		}, because: "may not write /serviceaccounts/token"},
		"a GatewayNode": {do: create(gatewayNode("x")), because: "may not write gateway.isthmus.dev/gatewaynodes"},
	}, controller)
	w.permit(t, map[string]permitted{
		"its Lease":             {controller, create(lease(system, "isthmus-controller"))},
		"the federation's":      {controller, create(lease(system, "isthmus-federation"))},
		"an import":             {controller, create(serviceImport("x", labels(managedBy, isthmus.ManagedBy)))},
		"a slice":               {controller, merge(ours, `{"endpoints":[{"addresses":["10.1.0.2"]}]}`)},
		"the label of a slice":  {controller, merge(stripped, `{"metadata":{"labels":{"endpointslice.kubernetes.io/managed-by":"isthmus.dev"}}}`)},
		"a Service of machines": {controller, merge(machines, `{"spec":{"ports":[{"port":81}]}}`)},
		"its deletion":          {controller, remove(machines)},
		"the status of exports": {controller, mergeStatus(exported, `{"status":{"conditions":[]}}`)},
		"an event":              {controller, create(event())},
		"a review of a token":   {controller, create(tokenReview())},
		"a review of rights":    {controller, create(accessReview())},
		"its token":             {controller, merge(own, `{"stringData":{"token":"new","replaced":"member-a-token"}}`)},
		"a supervisor's token":  {controller, merge(federated, `{"stringData":{"token":"new","replaced":"federation-a-token-x"}}`)},
		"the former token":      {controller, merge(own, `{"data":{"replaced":null}}`)},
		"a property of a claim": {controller, create(&about.ClusterProperty{ObjectMeta: metav1.ObjectMeta{Name: "x.example.org", Labels: map[string]string{managedBy: federation.ManagedBy}}, Spec: about.ClusterPropertySpec{Value: "a"}})},
		"a claim of a property": {controller, create(&federation.ClusterClaim{ObjectMeta: metav1.ObjectMeta{Name: "x", Labels: map[string]string{managedBy: isthmus.ManagedBy}}, Spec: federation.ClusterClaimSpec{Name: "x", Value: "y"}})},
	})
}

// A stolen token of the gateway controller changes of Services only what the gateways need.
func TestStolenGatewayController(t *testing.T) {
	w := newTestbed(t)
	plain, managed := service("plain"), balancer("managed", annotations("gateway.isthmus.dev/managed", "true"))
	asks := balancer("asks", annotations("gateway.isthmus.dev/external-ips", "true", "gateway.isthmus.dev/own-external-ips", "192.0.2.9"))
	asks.Spec.ExternalIPs = []string{"192.0.2.8", "192.0.2.9"}
	foreignSlice := slice("foreign")
	node := gatewayNode("fences")
	data := map[string][]byte{"tls.crt": []byte("old"), "tls.key": []byte("old"), "ca.crt": []byte("old"), "token": []byte("old")}
	secret := &corev1.Secret{ObjectMeta: metav1.ObjectMeta{Namespace: system, Name: "fences"}, Data: data}
	foreignSecret := &corev1.Secret{ObjectMeta: metav1.ObjectMeta{Namespace: shop, Name: "fences"}, Data: data}
	for _, o := range []client.Object{plain, managed, asks, foreignSlice, secret, foreignSecret, node} {
		w.put(o)
	}
	lease := func(namespace, name string) *coordinationv1.Lease {
		return &coordinationv1.Lease{ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: name}}
	}
	w.run(t, map[string]attack{
		"a Service that is no balancer": {do: merge(plain, `{"metadata":{"annotations":{"gateway.isthmus.dev/port":"x"}}}`), because: "only Services of type LoadBalancer"},
		"its status":                    {do: mergeStatus(plain, `{"status":{"conditions":[{"type":"x","status":"True","reason":"y","message":"","lastTransitionTime":"2026-01-01T00:00:00Z"}]}}`), because: "only Services of type LoadBalancer"},
		"a selector":                    {do: merge(managed, `{"spec":{"selector":{"app":"evil"}}}`), because: "nothing of a Service's spec but externalIPs"},
		"a port":                        {do: merge(managed, `{"spec":{"ports":[{"port":81}]}}`), because: "nothing of a Service's spec but externalIPs"},
		"an external name":              {do: merge(managed, `{"spec":{"type":"ExternalName","externalName":"evil.example.org"}}`), because: "nothing of a Service's spec but externalIPs"},
		"externalIPs that nobody asks":  {do: merge(managed, `{"spec":{"externalIPs":["10.96.0.1"]}}`), because: "adds externalIPs only to Services with the annotation"},
		"externalIPs, asked for itself": {do: merge(managed, `{"metadata":{"annotations":{"gateway.isthmus.dev/external-ips":"true"}},"spec":{"externalIPs":["10.96.0.1"]}}`), because: "changes only the annotations managed, port"},
		"a user's externalIP, removed":  {do: merge(asks, `{"spec":{"externalIPs":["192.0.2.9"]}}`), because: "removes only"},
		"a label":                       {do: merge(managed, `{"metadata":{"labels":{"a":"b"}}}`), because: "nothing else of a Service's metadata"},
		"a mark":                        {do: merge(managed, `{"metadata":{"labels":{"app.kubernetes.io/managed-by":"federation.isthmus.dev"}}}`), because: "nothing else of a Service's metadata"},
		"a user's annotation":           {do: merge(managed, `{"metadata":{"annotations":{"svc.global.federated.antreaplus.vmware.com":"shop"}}}`), because: "changes only the annotations managed, port"},
		"a user's request":              {do: merge(asks, `{"metadata":{"annotations":{"gateway.isthmus.dev/external-ips":null}}}`), because: "changes only the annotations managed, port"},
		"an owner":                      {do: merge(managed, `{"metadata":{"ownerReferences":[{"apiVersion":"v1","kind":"Pod","name":"x","uid":"y"}]}}`), because: "nothing else of a Service's metadata"},
		"a foreign finalizer":           {do: merge(managed, `{"metadata":{"finalizers":["example.org/keep"]}}`), because: "nothing else of a Service's metadata"},
		"a label by the status":         {do: mergeStatus(managed, `{"metadata":{"labels":{"a":"b"}}}`), because: "only the status of a Service by its status"},
		"a new Service":                 {do: create(balancer("x")), because: "may not create /services"},
		"a Service, deleted":            {do: remove(managed), because: "may not delete /services"},
		"a slice":                       {do: merge(foreignSlice, `{"endpoints":[{"addresses":["10.9.9.9"]}]}`), because: "may not update discovery.k8s.io/endpointslices"},
		"an import":                     {do: create(serviceImport("x")), because: "may not create multicluster.x-k8s.io/serviceimports"},
		"a key of a Secret":             {do: merge(secret, `{"stringData":{"a":"b"}}`), because: "changes only certificates and their keys"},
		"a new certificate":             {do: merge(secret, `{"stringData":{"new.crt":"b"}}`), because: "changes only certificates and their keys"},
		"a removed certificate":         {do: merge(secret, `{"data":{"tls.crt":null}}`), because: "changes only certificates and their keys"},
		"a trusted authority":           {do: merge(secret, `{"stringData":{"ca.crt":"evil"}}`), because: "changes only certificates and their keys"},
		"a token":                       {do: merge(secret, `{"stringData":{"token":"evil"}}`), because: "changes only certificates and their keys"},
		"a Secret's label":              {do: merge(secret, `{"metadata":{"labels":{"a":"b"}}}`), because: "changes only certificates and their keys"},
		"a certificate elsewhere":       {do: merge(foreignSecret, `{"stringData":{"tls.crt":"new"}}`), because: "changes only certificates and their keys"},
		"a new Secret":                  {do: create(&corev1.Secret{ObjectMeta: metav1.ObjectMeta{Namespace: system, Name: "x"}}), because: "may not create /secrets"},
		"the controller's Lease":        {do: create(lease(system, "isthmus-controller")), because: "renews only the Lease"},
		"a Lease elsewhere":             {do: create(lease(shop, "isthmus-gateway-controller")), because: "renews only the Lease"},
		"a GatewayNode's spec":          {do: merge(node, `{"spec":{"group":"evil"}}`), because: "changes only its finalizer of a GatewayNode"},
		"a GatewayNode's label":         {do: merge(node, `{"metadata":{"labels":{"a":"b"}}}`), because: "changes only its finalizer of a GatewayNode"},
		"a GatewayNode, deleted":        {do: remove(node), because: "may not delete gateway.isthmus.dev/gatewaynodes"},
		"more rights":                   {do: create(moreRights()), because: "may not create rbac.authorization.k8s.io/clusterrolebindings"},
	}, gatewayCtl)
	w.permit(t, map[string]permitted{
		"takes a Service":       {gatewayCtl, merge(balancedPlain(w), `{"metadata":{"annotations":{"gateway.isthmus.dev/managed":"true","gateway.isthmus.dev/port":"x"},"finalizers":["gateway.isthmus.dev/addresses"]}}`)},
		"adds an externalIP":    {gatewayCtl, merge(asks, `{"metadata":{"annotations":{"gateway.isthmus.dev/own-external-ips":"192.0.2.10"}},"spec":{"externalIPs":["192.0.2.8","192.0.2.10"]}}`)},
		"writes addresses":      {gatewayCtl, mergeStatus(managed, `{"status":{"loadBalancer":{"ingress":[{"ip":"192.0.2.1"}]}}}`)},
		"its Lease":             {gatewayCtl, create(lease(system, "isthmus-gateway-controller"))},
		"an event":              {gatewayCtl, create(event())},
		"a review of a token":   {gatewayCtl, create(tokenReview())},
		"a review of rights":    {gatewayCtl, create(accessReview())},
		"a renewed certificate": {gatewayCtl, merge(secret, `{"stringData":{"tls.crt":"new","tls.key":"new"}}`)},
		"a finalizer of a node": {gatewayCtl, merge(node, `{"metadata":{"finalizers":["gateway.isthmus.dev/address-pairs"]}}`)},
	})
}

func tokenReview() client.Object {
	return &authenticationv1.TokenReview{Spec: authenticationv1.TokenReviewSpec{Token: "none"}}
}

func accessReview() client.Object {
	return &authorizationv1.SubjectAccessReview{Spec: authorizationv1.SubjectAccessReviewSpec{
		User: "someone", NonResourceAttributes: &authorizationv1.NonResourceAttributes{Path: "/metrics", Verb: "get"},
	}}
}

func balancedPlain(w *testbed) client.Object {
	o := balancer("untouched")
	w.put(o)
	return o
}

func gatewayNode(name string) *gateway.GatewayNode {
	return &gateway.GatewayNode{ObjectMeta: metav1.ObjectMeta{Name: name}, Spec: gateway.GatewayNodeSpec{URL: "https://192.0.2.11:9479"}}
}

// typed returns o with its kind, as an apply needs it.
func typed(o client.Object) client.Object {
	kinds, _, err := scheme.ObjectKinds(o)
	if err != nil {
		panic(err) // the kinds are fixed
	}
	o.GetObjectKind().SetGroupVersionKind(kinds[0])
	return o
}

func pod() *corev1.Pod {
	return with(&corev1.Pod{Spec: corev1.PodSpec{Containers: []corev1.Container{{Name: "x", Image: "x"}}}}, "x", nil)
}

func deployment() *appsv1.Deployment {
	pod := corev1.PodTemplateSpec{ObjectMeta: metav1.ObjectMeta{Labels: map[string]string{"a": "b"}}, Spec: corev1.PodSpec{Containers: []corev1.Container{{Name: "x", Image: "x"}}}}
	return with(&appsv1.Deployment{Spec: appsv1.DeploymentSpec{Selector: &metav1.LabelSelector{MatchLabels: pod.Labels}, Template: pod}}, "x", nil)
}

func moreRights() *rbacv1.ClusterRoleBinding {
	return &rbacv1.ClusterRoleBinding{
		ObjectMeta: metav1.ObjectMeta{Name: "more"}, RoleRef: rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: "ClusterRole", Name: "view"},
	}
}

func event() *eventsv1.Event {
	return with(&eventsv1.Event{
		EventTime: metav1.NowMicro(), ReportingController: "x", ReportingInstance: "y", Type: "Normal", Reason: "R", Action: "A",
		Regarding: corev1.ObjectReference{APIVersion: "v1", Kind: "Service", Namespace: shop, Name: "x"},
	}, "x", nil)
}
