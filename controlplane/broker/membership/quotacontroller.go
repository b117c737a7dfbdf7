package membership

import (
	"context"
	"fmt"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/intstr"
	"k8s.io/client-go/util/retry"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/isthmus-net/isthmus/controlplane/api/access"
	"github.com/isthmus-net/isthmus/controlplane/api/v1alpha1"
	"github.com/isthmus-net/isthmus/controlplane/internal/kube/admin"
)

// NoQuotaController as the image of a Broker removes the quota controller.
const NoQuotaController = "none"

// quotaControllerAway is how long a Lease may be old before the quota controller counts as away: several times its duration.
const quotaControllerAway = time.Minute

// OverQuota returns the quotas that each member exceeds on the broker, as its quota controller lists them, and whether that
// controller runs. Without it nothing bounds what a member stores there, and the list is old.
func OverQuota(ctx context.Context, broker client.Client, namespace string) (over map[string][]v1alpha1.OverQuota, running bool, err error) {
	config, err := readConfig(ctx, broker, namespace)
	if err != nil {
		return nil, false, err
	}
	over = map[string][]v1alpha1.OverQuota{}
	for _, o := range config.Status.OverQuota {
		over[o.Member] = append(over[o.Member], o)
	}
	lease := &coordinationv1.Lease{}
	err = broker.Get(ctx, client.ObjectKey{Namespace: namespace, Name: v1alpha1.QuotaController}, lease)
	switch {
	case apierrors.IsNotFound(err):
		return over, false, nil
	case err != nil:
		return nil, false, fmt.Errorf("read Lease %s/%s: %w", namespace, v1alpha1.QuotaController, err)
	}
	held := lease.Spec.HolderIdentity != nil && *lease.Spec.HolderIdentity != ""
	return over, held && lease.Spec.RenewTime != nil && time.Since(lease.Spec.RenewTime.Time) < quotaControllerAway, nil
}

// quotaController writes the rights of the quota controller, and the Deployment if b names an image.
func (b Broker) quotaController(ctx context.Context, c client.Client) error {
	if b.QuotaController == NoQuotaController {
		return b.removeQuotaController(ctx, c)
	}
	running, err := runningOn(ctx, c, b.Namespace, v1alpha1.QuotaController)
	if err != nil {
		return err
	}
	return applyAll(ctx, c, running.keep(b.quotaObjects()))
}

// quotaObjects returns the rights of the quota controller, and its Deployment if b names an image.
func (b Broker) quotaObjects() []client.Object {
	meta := metav1.ObjectMeta{Namespace: b.Namespace, Name: v1alpha1.QuotaController, Labels: admin.Ours()}
	objects := []client.Object{
		&corev1.ServiceAccount{ObjectMeta: meta},
		&rbacv1.Role{ObjectMeta: meta, Rules: access.QuotaControllerRules()},
		binding(b.Namespace, v1alpha1.QuotaController, v1alpha1.QuotaController, v1alpha1.QuotaController),
		reviews(b.Namespace, "quota-controller", v1alpha1.QuotaController),
	}
	if b.QuotaController == "" {
		return objects
	}
	return append(objects, brokerDeployment(meta, b.QuotaController, b.PullSecrets, "quota-controller", "--quota-controller"))
}

// reviews returns the right of a controller on the broker to review the tokens of requests for its metrics.
func reviews(namespace, name, account string) *rbacv1.ClusterRoleBinding {
	return &rbacv1.ClusterRoleBinding{
		ObjectMeta: metav1.ObjectMeta{Name: "isthmus." + namespace + "." + name, Labels: admin.Ours()},
		RoleRef:    rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: "ClusterRole", Name: "system:auth-delegator"},
		Subjects:   []rbacv1.Subject{{Kind: rbacv1.ServiceAccountKind, Name: account, Namespace: namespace}},
	}
}

// removeQuotaController removes the Deployment and the rights, and the list, which no program would update any more: listed
// members could never create an object again.
func (b Broker) removeQuotaController(ctx context.Context, c client.Client) error {
	meta := metav1.ObjectMeta{Namespace: b.Namespace, Name: v1alpha1.QuotaController}
	for _, obj := range []client.Object{
		&appsv1.Deployment{ObjectMeta: meta}, &rbacv1.RoleBinding{ObjectMeta: meta}, &rbacv1.Role{ObjectMeta: meta}, reviews(b.Namespace, "quota-controller", v1alpha1.QuotaController),
		&corev1.ServiceAccount{ObjectMeta: meta}, &coordinationv1.Lease{ObjectMeta: meta},
	} {
		if err := admin.DeleteIfThere(ctx, c, obj, client.PropagationPolicy(metav1.DeletePropagationBackground)); err != nil {
			return err
		}
	}
	err := retry.RetryOnConflict(contention, func() error {
		config, err := readConfig(ctx, c, b.Namespace)
		if err != nil || len(config.Status.OverQuota) == 0 {
			return err
		}
		config.Status.OverQuota = nil
		return c.Status().Update(ctx, config, admin.FieldOwner)
	})
	if err != nil {
		return fmt.Errorf("remove status.overQuota of the ClusterSetConfig: %w", err)
	}
	return nil
}

// brokerDeployment returns a Deployment of isthmus-controller on the broker, with the flag that says what it controls. One replica
// acts, the other one waits for its Lease. Without pullSecrets (nil), it keeps those of the Deployment that runs (deployment.keep).
func brokerDeployment(meta metav1.ObjectMeta, image string, pullSecrets []string, container, flag string) *appsv1.Deployment {
	selector := map[string]string{"app.kubernetes.io/name": meta.Name}
	probe := func(path string) *corev1.Probe {
		return &corev1.Probe{ProbeHandler: corev1.ProbeHandler{HTTPGet: &corev1.HTTPGetAction{Path: path, Port: intstr.FromString("https"), Scheme: corev1.URISchemeHTTPS}}}
	}
	healthy := probe("/healthz")
	healthy.InitialDelaySeconds, healthy.FailureThreshold = 10, 6
	var pull []corev1.LocalObjectReference
	if pullSecrets != nil {
		pull = []corev1.LocalObjectReference{}
	}
	for _, name := range pullSecrets {
		pull = append(pull, corev1.LocalObjectReference{Name: name})
	}
	return &appsv1.Deployment{
		ObjectMeta: meta,
		Spec: appsv1.DeploymentSpec{
			Replicas: new(int32(2)),
			Selector: &metav1.LabelSelector{MatchLabels: selector},
			Template: corev1.PodTemplateSpec{
				ObjectMeta: metav1.ObjectMeta{Labels: selector},
				Spec: corev1.PodSpec{
					ServiceAccountName: meta.Name, ImagePullSecrets: pull,
					SecurityContext: &corev1.PodSecurityContext{
						RunAsNonRoot: new(true), RunAsUser: new(int64(65532)), RunAsGroup: new(int64(65532)),
						SeccompProfile: &corev1.SeccompProfile{Type: corev1.SeccompProfileTypeRuntimeDefault},
					},
					Containers: []corev1.Container{{
						Name: container, Image: image,
						Args:          []string{flag, "--namespace=" + meta.Namespace},
						Ports:         []corev1.ContainerPort{{Name: "https", ContainerPort: v1alpha1.ControllerPort}},
						LivenessProbe: healthy, ReadinessProbe: probe("/readyz"),
						SecurityContext: &corev1.SecurityContext{
							AllowPrivilegeEscalation: new(false), ReadOnlyRootFilesystem: new(true),
							Capabilities: &corev1.Capabilities{Drop: []corev1.Capability{"ALL"}},
						},
					}},
				},
			},
		},
	}
}
