// Package admission defines the ValidatingAdmissionPolicies of a federation, which API servers enforce without a webhook.
//
//   - [Claims]: a ClusterClaim cannot change while a Federation refers to it. Its parameter is the Federation.
//   - [Fence]: a member rejects writes from former leaders. Its parameter is the member's Lease.
//   - [Own]: a member rejects writes of supervisors to objects that do not belong to the federation, and Services that could
//     take other traffic than the federation's.
//   - [Endpoints]: a member rejects endpoints that a supervisor adds to a user's Service. Its parameters are the users' Services.
//   - [Tokens]: a member rejects tokens of a supervisor's account that the supervisor itself could keep beyond a rotation.
//   - [VIPs]: a member rejects ClusterSetIPs of supervisors outside of the ranges. Its parameter is the member's Federation.
package admission

import (
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"

	admissionv1 "k8s.io/api/admissionregistration/v1"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	federationv1alpha1 "github.com/isthmus-net/isthmus/controlplane/api/federation/v1alpha1"
	"github.com/isthmus-net/isthmus/controlplane/api/v1alpha1"
	"github.com/isthmus-net/isthmus/controlplane/clusterset"
)

// Names of the policies and of their bindings.
const (
	ClaimsName    = "isthmus-federation-claims"
	EndpointsName = "isthmus-federation-endpoints"
	FenceName     = "isthmus-federation-fence"
	OwnName       = "isthmus-federation-own"
	TokensName    = "isthmus-federation-tokens"
	VIPsName      = "isthmus-federation-vips"
)

// Policies returns all policies of a member with Isthmus in namespace, and their bindings.
func Policies(namespace string, member clusterset.ClusterID) []client.Object {
	return slices.Concat(Claims(), Parameters(), Fence(namespace, member), Own(namespace), Endpoints(namespace), Tokens(namespace), VIPs(namespace))
}

// Claims returns the policy and its binding. The claim of the cluster's id can be neither changed nor deleted while the
// cluster's Federation refers to it. A Federation refers to the ids of its members; one without members, as in a child
// cluster, refers to the cluster's own id.
func Claims() []client.Object {
	return rule(ClaimsName, admissionv1.ValidatingAdmissionPolicySpec{
		ParamKind: &admissionv1.ParamKind{APIVersion: federationv1alpha1.GroupVersion.String(), Kind: "Federation"},
		MatchConstraints: &admissionv1.MatchResources{ResourceRules: []admissionv1.NamedRuleWithOperations{{
			RuleWithOperations: admissionv1.RuleWithOperations{
				Operations: []admissionv1.OperationType{admissionv1.Update, admissionv1.Delete},
				Rule:       admissionv1.Rule{APIGroups: []string{federationv1alpha1.GroupVersion.Group}, APIVersions: []string{"*"}, Resources: []string{"clusterclaims"}},
			},
		}}},
		// The condition reads the object's name, because a request to delete a collection has no resource name.
		MatchConditions: []admissionv1.MatchCondition{{
			Name: "of-the-id", Expression: fmt.Sprintf("oldObject.metadata.name == %q", federationv1alpha1.ClaimID),
		}},
		Variables: []admissionv1.Variable{
			{Name: "members", Expression: `params.spec.?members.orValue([])`},
			{Name: "referred", Expression: `variables.members.size() == 0 || variables.members.exists(m, m.clusterID == oldObject.spec.value)`},
		},
		Validations: []admissionv1.Validation{{
			Expression: `!variables.referred || request.operation == "UPDATE" && object.spec.value == oldObject.spec.value`,
			MessageExpression: `"spec.value is " + oldObject.spec.value + ", and the Federation of this cluster refers to it; ` +
				`run isthmusctl federation remove before you change it"`,
		}},
	}, &admissionv1.ParamRef{Name: federationv1alpha1.FederationName}, admissionv1.Fail)
}

// Fence returns the policy and its binding for a member with Isthmus in namespace. The member rejects the writes of a
// supervisor that does not hold the member's Lease, or whose epoch is over. A delete and a status update carry no epoch, so
// the epoch of the stored object counts.
//
// If there is no Lease, or the API server cannot find it, the policy rejects nothing. An API server looks for the parameter
// before it checks who writes, so any other choice would reject every write of every user.
func Fence(namespace string, member clusterset.ClusterID) []client.Object {
	spec := ofSupervisors(namespace)
	spec.ParamKind = leaseKind()
	spec.Variables = []admissionv1.Variable{
		{Name: "supervisor", Expression: fmt.Sprintf("request.userInfo.username.substring(size(%q))", accounts(namespace))},
		{Name: "holder", Expression: `params.spec.?holderIdentity.orValue("")`},
		{Name: "epoch", Expression: `params.spec.?leaseTransitions.orValue(0)`},
		{Name: "shown", Expression: `request.operation == "DELETE" || request.operation == "UPDATE" && request.?subResource.orValue("") != "" ? oldObject : object`},
		{Name: "said", Expression: fmt.Sprintf(`variables.shown.metadata.?annotations[?%q].orValue("none")`, federationv1alpha1.AnnotationEpoch)},
	}
	spec.Validations = []admissionv1.Validation{
		{
			Expression:        `variables.holder.startsWith(variables.supervisor + "/")`,
			MessageExpression: `"supervisor " + variables.supervisor + " does not lead this cluster; its Lease is held by \"" + variables.holder + "\""`,
			Reason:            new(metav1.StatusReasonForbidden),
		},
		{
			Expression: `variables.said.matches("^[0-9]{1,9}$") && int(variables.said) >= variables.epoch`,
			MessageExpression: fmt.Sprintf(`"annotation %s is " + variables.said + ", and this cluster is in epoch " + string(variables.epoch)`,
				federationv1alpha1.AnnotationEpoch),
			Reason: new(metav1.StatusReasonForbidden),
		},
	}
	return rule(FenceName, spec, &admissionv1.ParamRef{Namespace: namespace, Name: string(member)}, admissionv1.Ignore)
}

// Parameters returns policies that match no object, and their bindings: one whose parameters are Leases, and one whose parameters are
// Services. They stay in a cluster for good once a [Fence] or [Endpoints] was there. An API server stops to follow a kind when the last
// policy with parameters of it is removed, and does not begin again until it restarts (ensureParamsForPolicyLocked in k8s.io/apiserver
// 1.36). Without them a cluster that left a federation and joined again would compare with its objects of the past: it would reject the
// writes of every new leader.
func Parameters() []client.Object {
	return slices.Concat(follow("isthmus-lease-parameters", leaseKind()), follow("isthmus-service-parameters", serviceKind()))
}

// IsParameters reports whether an object is one of Parameters.
func IsParameters(o client.Object) bool {
	return slices.ContainsFunc(Parameters(), func(p client.Object) bool { return p.GetName() == o.GetName() })
}

func leaseKind() *admissionv1.ParamKind {
	return &admissionv1.ParamKind{APIVersion: "coordination.k8s.io/v1", Kind: "Lease"}
}

func serviceKind() *admissionv1.ParamKind {
	return &admissionv1.ParamKind{APIVersion: "v1", Kind: "Service"}
}

// follow returns a policy that makes API servers follow a kind, and its binding.
func follow(name string, kind *admissionv1.ParamKind) []client.Object {
	spec := admissionv1.ValidatingAdmissionPolicySpec{
		ParamKind: kind,
		MatchConstraints: &admissionv1.MatchResources{ResourceRules: []admissionv1.NamedRuleWithOperations{{
			RuleWithOperations: admissionv1.RuleWithOperations{
				Operations: []admissionv1.OperationType{admissionv1.Create},
				Rule:       admissionv1.Rule{APIGroups: []string{"none.isthmus.dev"}, APIVersions: []string{"v1"}, Resources: []string{"none"}},
			},
		}}},
		Validations: []admissionv1.Validation{{Expression: "true"}},
	}
	return rule(name, spec, &admissionv1.ParamRef{Namespace: "default", Name: "none"}, admissionv1.Ignore)
}

// Endpoints returns the policy and its binding. A supervisor's EndpointSlice does not belong to a Service of its namespace that lacks the
// label of the federation: a thief of the token adds no endpoints to a user's Service. [Own] sees to it that each of its slices has the
// label by which this policy selects them, so that slices of others cost nothing.
func Endpoints(namespace string) []client.Object {
	spec := ofSupervisors(namespace)
	spec.ParamKind = serviceKind()
	spec.MatchConstraints = &admissionv1.MatchResources{
		ObjectSelector: &metav1.LabelSelector{MatchLabels: map[string]string{discoveryv1.LabelManagedBy: federationv1alpha1.ManagedBy}},
		ResourceRules: []admissionv1.NamedRuleWithOperations{{RuleWithOperations: admissionv1.RuleWithOperations{
			Operations: []admissionv1.OperationType{admissionv1.Create, admissionv1.Update},
			Rule:       admissionv1.Rule{APIGroups: []string{discoveryv1.GroupName}, APIVersions: []string{"*"}, Resources: []string{"endpointslices"}},
		}}},
	}
	spec.Validations = []admissionv1.Validation{{
		Expression:        fmt.Sprintf(`object.metadata.?labels[?%q].orValue("") != params.metadata.name`, discoveryv1.LabelServiceName),
		MessageExpression: `"Service " + params.metadata.namespace + "/" + params.metadata.name + " is not the federation's; a supervisor may not add endpoints to it"`,
		Reason:            new(metav1.StatusReasonForbidden),
	}}
	users := &metav1.LabelSelector{MatchExpressions: []metav1.LabelSelectorRequirement{{
		Key: v1alpha1.LabelManagedBy, Operator: metav1.LabelSelectorOpNotIn, Values: []string{federationv1alpha1.ManagedBy},
	}}}
	return rule(EndpointsName, spec, &admissionv1.ParamRef{Selector: users}, admissionv1.Ignore)
}

// notes are the annotations that leaders write on users' objects.
var notes = []string{
	federationv1alpha1.AnnotationEpoch, federationv1alpha1.AnnotationServiceStatus, federationv1alpha1.AnnotationPolicyStatus,
}

// policyWishes are the annotations by which users request that a policy reaches other members. Whoever deletes a copy of it in a member
// removes it in all of them, so leaders may delete it.
var policyWishes = []string{federationv1alpha1.AnnotationPolicy, federationv1alpha1.AnnotationPolicyAntrea}

// wishes are the annotations by which users request that an object reaches other members. No leader writes one.
var wishes = []string{
	federationv1alpha1.AnnotationGlobalService, federationv1alpha1.AnnotationGlobalServiceAntreaTanzu, federationv1alpha1.AnnotationGlobalServiceAntrea,
	federationv1alpha1.AnnotationService, federationv1alpha1.AnnotationServiceAntreaTanzu, federationv1alpha1.AnnotationServiceAntrea,
	federationv1alpha1.AnnotationPolicy, federationv1alpha1.AnnotationPolicyAntrea,
	federationv1alpha1.AnnotationAskHostname, federationv1alpha1.MarkVirtualMachines,
}

// sameSpec holds when a write changes nothing in a spec. The API server keeps the former internalTrafficPolicy of a Service
// that became an ExternalName, and omits it in oldObject, so that field always seems to change.
const sameSpec = `object.spec == oldObject.spec || request.kind.group == "" && request.kind.kind == "Service" && ` +
	`object.spec.type == "ExternalName" && ["type", "externalName", "ports", "selector", "clusterIP", "clusterIPs", "ipFamilies", ` +
	`"ipFamilyPolicy", "externalIPs", "sessionAffinity", "sessionAffinityConfig", "loadBalancerIP", "loadBalancerSourceRanges", ` +
	`"loadBalancerClass", "allocateLoadBalancerNodePorts", "externalTrafficPolicy", "healthCheckNodePort", ` +
	`"publishNotReadyAddresses", "trafficDistribution"].all(f, object.spec[?f] == oldObject.spec[?f])`

// Own returns the policy and its binding. The member rejects that a supervisor creates, changes or deletes an object
// without the label of the federation. The federation's Services have type ClusterIP, no selector and no externalIPs, and
// nothing of it is in namespaces kube-*: a thief of the token cannot take the traffic to an address by spec.externalIPs
// (CVE-2020-8554). Leaders may delete the policies that users asked to replicate. On users' objects leaders may write their notes. On no object may they write the
// annotations by which users request federation: the leaders of other members would act on them.
func Own(namespace string) []client.Object {
	const ours = `(has(%[1]s.metadata.labels) && (%[1]s.metadata.labels[?%[2]q].orValue("") == %[4]q || %[1]s.metadata.labels[?%[3]q].orValue("") == %[4]q))`
	is := func(object string) string {
		return fmt.Sprintf(ours, object, v1alpha1.LabelManagedBy, discoveryv1.LabelManagedBy, federationv1alpha1.ManagedBy)
	}
	spec := ofSupervisors(namespace)
	spec.Variables = []admissionv1.Variable{
		{Name: "before", Expression: `request.operation == "CREATE" || ` + is("oldObject") + ` || request.operation == "DELETE" && request.resource.group != "" && ` +
			list(policyWishes) + `.exists(k, oldObject.metadata.?annotations[?k].orValue("") == "true")`},
		{Name: "after", Expression: `request.operation == "DELETE" || ` + is("object")},
		{Name: "was", Expression: `request.operation == "CREATE" ? {} : oldObject.metadata.?annotations.orValue({})`},
		{Name: "is", Expression: `request.operation == "DELETE" ? {} : object.metadata.?annotations.orValue({})`},
		{Name: "differs", Expression: `variables.is.map(k, !(k in variables.was) || variables.was[k] != variables.is[k], k) + ` +
			`variables.was.map(k, request.operation == "UPDATE" && !(k in variables.is), k)`},
		{Name: "same", Expression: sameSpec},
		{Name: "isService", Expression: `request.resource.group == "" && request.resource.resource == "services"`},
		{Name: "annotated", Expression: `request.operation == "UPDATE" && has(object.spec) && has(oldObject.spec) && variables.same && ` +
			`["labels", "ownerReferences", "finalizers"].all(f, object.metadata[?f].orValue([]) == oldObject.metadata[?f].orValue([])) && ` +
			`variables.differs.all(k, k in ` + list(notes) + `)`},
	}
	spec.Validations = []admissionv1.Validation{
		{
			Expression: `variables.before && variables.after || request.?subResource.orValue("") == "" && variables.annotated`,
			Message: fmt.Sprintf("a supervisor may write objects with the label %s=%s or %s=%[2]s, delete policies that users asked to replicate, and write on other objects only the annotations %s",
				v1alpha1.LabelManagedBy, federationv1alpha1.ManagedBy, discoveryv1.LabelManagedBy, strings.Join(notes, ", ")),
			Reason: new(metav1.StatusReasonForbidden),
		},
		{
			Expression: `!variables.is.exists(k, k in variables.differs && k in ` + list(wishes) + `)`,
			Message:    "a supervisor may not write the annotations by which users request federation: " + strings.Join(wishes, ", "),
			Reason:     new(metav1.StatusReasonForbidden),
		},
		{
			Expression: `!variables.isService || request.operation == "DELETE" || request.operation == "UPDATE" && variables.same || ` +
				`dyn(object).spec.?type.orValue("ClusterIP") == "ClusterIP" && ` +
				`dyn(object).spec.?externalIPs.orValue([]) == [] && dyn(object).spec.?selector.orValue({}) == {}`,
			Message: "a supervisor may write only Services of type ClusterIP, without externalIPs and without a selector",
			Reason:  new(metav1.StatusReasonForbidden),
		},
		{
			Expression: `request.operation == "DELETE" || request.operation == "UPDATE" && variables.annotated || ` +
				`!request.?namespace.orValue("").startsWith("kube-")`,
			MessageExpression: `"namespaces kube-* are not federated; a supervisor may not write " + request.resource.resource + " in " + request.namespace`,
			Reason:            new(metav1.StatusReasonForbidden),
		},
		{
			Expression: fmt.Sprintf(`request.resource.resource != "endpointslices" || request.operation == "DELETE" || variables.annotated || object.metadata.?labels[?%q].orValue("") == %q`,
				discoveryv1.LabelManagedBy, federationv1alpha1.ManagedBy),
			Message: fmt.Sprintf("a supervisor's EndpointSlices have the label %s=%s", discoveryv1.LabelManagedBy, federationv1alpha1.ManagedBy),
			Reason:  new(metav1.StatusReasonForbidden),
		},
	}
	return rule(OwnName, spec, nil, admissionv1.Fail)
}

// Tokens returns the policy and its binding. A supervisor requests tokens of its own account only, bound to the Secret that its
// rights name, and for at most [federationv1alpha1.TokenLifetime]. A thief of a token therefore keeps nothing beyond isthmusctl
// federation rotate: that deletes the Secret. A supervisor deletes no other Secrets than those with tokens of its own account that do
// not expire, which earlier versions of Isthmus issued.
func Tokens(namespace string) []client.Object {
	spec := ofSupervisors(namespace)
	spec.MatchConstraints = &admissionv1.MatchResources{ResourceRules: []admissionv1.NamedRuleWithOperations{
		on(admissionv1.Create, "serviceaccounts/token"), on(admissionv1.Delete, "secrets"),
	}}
	spec.Variables = []admissionv1.Variable{
		{Name: "account", Expression: fmt.Sprintf("request.userInfo.username.substring(size(%q))", strings.TrimSuffix(accounts(namespace), federationv1alpha1.SupervisorAccountPrefix))},
		{Name: "requests", Expression: `request.resource.resource == "serviceaccounts"`},
		{Name: "boundKind", Expression: `variables.requests ? dyn(object).spec.?boundObjectRef.?kind.orValue("") : ""`},
		{Name: "boundName", Expression: `variables.requests ? dyn(object).spec.?boundObjectRef.?name.orValue("") : ""`},
	}
	forbid := func(expression, message string) admissionv1.Validation {
		return admissionv1.Validation{Expression: expression, MessageExpression: message, Reason: new(metav1.StatusReasonForbidden)}
	}
	spec.Validations = []admissionv1.Validation{
		forbid(fmt.Sprintf(`!variables.requests || request.namespace == %q && request.name == variables.account`, namespace),
			`variables.account + " may not request a token of " + request.namespace + "/" + request.name`),
		forbid(fmt.Sprintf(`!variables.requests || variables.boundKind == "Secret" && variables.boundName != "" && `+
			`authorizer.group(%q).resource(%q).namespace(%q).name(variables.boundName).check("use").allowed()`,
			federationv1alpha1.GroupVersion.Group, federationv1alpha1.ResourceCredentials, namespace),
			`"the token is bound to " + variables.boundKind + "/" + variables.boundName + ", and Role `+TokensName+`-* names another Secret for " + variables.account`),
		forbid(fmt.Sprintf(`!variables.requests || dyn(object).spec.?expirationSeconds.orValue(0) <= %d`, int64(federationv1alpha1.TokenLifetime/time.Second)),
			fmt.Sprintf(`"a token of a supervisor lives for at most %d seconds"`, int64(federationv1alpha1.TokenLifetime/time.Second))),
		forbid(fmt.Sprintf(`variables.requests || request.namespace == %q && dyn(oldObject).?type.orValue("") == %q && dyn(oldObject).metadata.?annotations[?%q].orValue("") == variables.account`,
			namespace, corev1.SecretTypeServiceAccountToken, corev1.ServiceAccountNameKey),
			`variables.account + " deletes only Secrets with its own tokens"`),
	}
	return rule(TokensName, spec, nil, admissionv1.Fail)
}

// on returns the rule for an operation on a resource of the core group.
func on(operation admissionv1.OperationType, resource string) admissionv1.NamedRuleWithOperations {
	return admissionv1.NamedRuleWithOperations{RuleWithOperations: admissionv1.RuleWithOperations{
		Operations: []admissionv1.OperationType{operation},
		Rule:       admissionv1.Rule{APIGroups: []string{""}, APIVersions: []string{"*"}, Resources: []string{resource}},
	}}
}

// VIPs returns the policy and its binding. The member rejects ServiceImports of supervisors with an address outside of
// spec.clusterSetIP.ranges of its own Federation: a thief of the token cannot give an import the API server's address. Only
// administrators of the member write that Federation. While it does not exist, there is nothing to compare with, and the policy
// rejects nothing.
//
// API servers of Kubernetes 1.30 cannot compare addresses and refuse this policy; see [NoVIPs].
func VIPs(namespace string) []client.Object {
	return vips(namespace, []admissionv1.Variable{
		{Name: "ranges", Expression: `params.spec.?clusterSetIP.?ranges.orValue([])`},
		{Name: "ips", Expression: `object.spec.?ips.orValue([])`},
	}, admissionv1.Validation{
		Expression: `variables.ips.all(i, isIP(i) && variables.ranges.exists(r, cidr(r).containsIP(ip(i))))`,
		MessageExpression: `"spec.ips is [" + variables.ips.join(" ") + "], and spec.clusterSetIP.ranges of this cluster's Federation is [" + ` +
			`variables.ranges.join(" ") + "]; set the ranges of the supervisors there, or run isthmusctl federation create again if it has none"`,
	})
}

// NoVIPs returns VIPs for an API server that cannot compare addresses. The member rejects all addresses.
func NoVIPs(namespace string) []client.Object {
	return vips(namespace, nil, admissionv1.Validation{
		Expression: `object.spec.?ips.orValue([]).size() == 0`,
		Message:    "this API server cannot tell which addresses belong to the federation; ClusterSetIPs need Kubernetes 1.31 or newer",
	})
}

func vips(namespace string, variables []admissionv1.Variable, validation admissionv1.Validation) []client.Object {
	validation.Reason = new(metav1.StatusReasonForbidden)
	spec := ofSupervisors(namespace)
	spec.ParamKind = &admissionv1.ParamKind{APIVersion: federationv1alpha1.GroupVersion.String(), Kind: "Federation"}
	spec.MatchConstraints = &admissionv1.MatchResources{ResourceRules: []admissionv1.NamedRuleWithOperations{{
		RuleWithOperations: admissionv1.RuleWithOperations{
			Operations: []admissionv1.OperationType{admissionv1.Create, admissionv1.Update},
			Rule:       admissionv1.Rule{APIGroups: []string{"multicluster.x-k8s.io"}, APIVersions: []string{"*"}, Resources: []string{"serviceimports"}},
		},
	}}}
	spec.Variables, spec.Validations = variables, []admissionv1.Validation{validation}
	return rule(VIPsName, spec, &admissionv1.ParamRef{Name: federationv1alpha1.FederationName}, admissionv1.Fail)
}

// list returns texts as a CEL list.
func list(texts []string) string {
	var quoted []string
	for _, text := range texts {
		quoted = append(quoted, strconv.Quote(text))
	}
	return "[" + strings.Join(quoted, ", ") + "]"
}

// accounts returns the common prefix of the names of all supervisors' accounts.
func accounts(namespace string) string {
	return fmt.Sprintf("system:serviceaccount:%s:%s", namespace, federationv1alpha1.SupervisorAccountPrefix)
}

// ofSupervisors returns a policy for all writes of supervisors, except for Leases, which elections need, events, which report what a
// supervisor observed, and those that [Tokens] restricts.
func ofSupervisors(namespace string) admissionv1.ValidatingAdmissionPolicySpec {
	everything := admissionv1.NamedRuleWithOperations{RuleWithOperations: admissionv1.RuleWithOperations{
		Operations: []admissionv1.OperationType{admissionv1.Create, admissionv1.Update, admissionv1.Delete},
		Rule:       admissionv1.Rule{APIGroups: []string{"*"}, APIVersions: []string{"*"}, Resources: []string{"*/*"}},
	}}
	except := func(group string, resource string) admissionv1.NamedRuleWithOperations {
		e := everything
		e.Rule = admissionv1.Rule{APIGroups: []string{group}, APIVersions: []string{"*"}, Resources: []string{resource}}
		return e
	}
	return admissionv1.ValidatingAdmissionPolicySpec{
		MatchConstraints: &admissionv1.MatchResources{
			ResourceRules: []admissionv1.NamedRuleWithOperations{everything},
			ExcludeResourceRules: []admissionv1.NamedRuleWithOperations{
				except("coordination.k8s.io", "leases"), except("", "events"), except("events.k8s.io", "events"),
				on(admissionv1.Create, "serviceaccounts/token"), on(admissionv1.Delete, "secrets"),
			},
		},
		MatchConditions: []admissionv1.MatchCondition{{
			Name: "by-a-supervisor", Expression: fmt.Sprintf("request.userInfo.username.startsWith(%q)", accounts(namespace)),
		}},
	}
}

// rule returns a policy and its binding. With a parameter it rejects nothing while the parameter does not exist. failure
// states the result of a request when the API server cannot evaluate the policy.
func rule(name string, spec admissionv1.ValidatingAdmissionPolicySpec, param *admissionv1.ParamRef, failure admissionv1.FailurePolicyType) []client.Object {
	labels := map[string]string{v1alpha1.LabelManagedBy: v1alpha1.ManagedBy}
	spec.FailurePolicy = &failure
	if param != nil {
		param.ParameterNotFoundAction = new(admissionv1.AllowAction)
	}
	return []client.Object{
		&admissionv1.ValidatingAdmissionPolicy{ObjectMeta: metav1.ObjectMeta{Name: name, Labels: labels}, Spec: spec},
		&admissionv1.ValidatingAdmissionPolicyBinding{ObjectMeta: metav1.ObjectMeta{Name: name, Labels: labels}, Spec: admissionv1.ValidatingAdmissionPolicyBindingSpec{
			PolicyName: name, ParamRef: param, ValidationActions: []admissionv1.ValidationAction{admissionv1.Deny},
		}},
	}
}
