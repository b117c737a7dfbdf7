package testbed

import (
	"context"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"sync/atomic"
	"time"

	authenticationv1 "k8s.io/api/authentication/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"

	"github.com/isthmus-net/isthmus/tools/process"
)

// containerd runs ctr on the containers that the kubelet made. It works while the kubelet is down.
func (tb *Testbed) containerd(ctx context.Context, node string, args ...string) (string, error) {
	return tb.Node(ctx, node, append([]string{"ctr", "--namespace", "k8s.io"}, args...)...)
}

// Exec runs a command in the first container of a pod and returns what it printed. Unlike kubectl exec
// it needs no kubelet.
func (tb *Testbed) Exec(ctx context.Context, member, namespace, pod string, args ...string) (string, error) {
	cmd, err := tb.ExecCommand(ctx, member, namespace, pod, args...)
	if err != nil {
		return "", err
	}
	return process.Output(cmd)
}

// ExecCommand returns the command that Exec runs. Signals that it gets reach the pod.
func (tb *Testbed) ExecCommand(ctx context.Context, member, namespace, pod string, args ...string) (*exec.Cmd, error) {
	node, id, err := tb.container(ctx, member, namespace, pod)
	if err != nil {
		return nil, err
	}
	session := "exec-" + strconv.FormatUint(execs.Add(1), 10) + "-" + strconv.Itoa(os.Getpid())
	return tb.Lab.NodeCommand(ctx, node, append([]string{"ctr", "--namespace", "k8s.io", "task", "exec", "--exec-id", session, id}, args...)...), nil
}

// OutsideCommand returns a command that runs in the network of a pod and outside of the node's cgroups, with the
// node's files: the node's socket hooks do not see it, as they do not see a virtual machine that a pod holds.
func (tb *Testbed) OutsideCommand(ctx context.Context, member, namespace, pod string, args ...string) (*exec.Cmd, error) {
	node, id, err := tb.container(ctx, member, namespace, pod)
	if err != nil {
		return nil, err
	}
	pid, err := tb.task(ctx, node, id)
	if err != nil {
		return nil, fmt.Errorf("pod %s/%s: %w", namespace, pod, err)
	}
	return tb.Lab.VisitorCommand(ctx, node, append([]string{"nsenter", "--net=/proc/" + pid + "/ns/net", "--"}, args...)...), nil
}

// task is the process of a container on a node, which is the same for as long as the container runs.
func (tb *Testbed) task(ctx context.Context, node, id string) (pid string, err error) {
	tb.mu.Lock()
	defer tb.mu.Unlock()
	if pid, ok := tb.tasks[id]; ok {
		return pid, nil
	}
	tasks, err := tb.containerd(ctx, node, "task", "ls")
	if err != nil {
		return "", err
	}
	for line := range strings.Lines(tasks) {
		if f := strings.Fields(line); len(f) > 1 && f[0] == id {
			tb.tasks[id] = f[1]
			return f[1], nil
		}
	}
	return "", fmt.Errorf("container %s is not running on %s", id, node)
}

// container finds the first container of a pod.
func (tb *Testbed) container(ctx context.Context, member, namespace, pod string) (node, id string, err error) {
	client, err := tb.client(member)
	if err != nil {
		return "", "", err
	}
	p, err := client.CoreV1().Pods(namespace).Get(ctx, pod, metav1.GetOptions{})
	if err != nil {
		return "", "", fmt.Errorf("find pod %s/%s of %s: %w", namespace, pod, member, err)
	}
	if id = containerID(p); id == "" {
		return "", "", fmt.Errorf("pod %s/%s of %s has no running container", namespace, pod, member)
	}
	return p.Spec.NodeName, id, nil
}

// containerID is containerd's name of a pod's first container; empty while there is none.
func containerID(p *corev1.Pod) string {
	if len(p.Status.ContainerStatuses) == 0 {
		return ""
	}
	return strings.TrimPrefix(p.Status.ContainerStatuses[0].ContainerID, "containerd://")
}

// client returns a client of a cluster's API server. Tests ask often: a kubectl for each question would be the most of
// what they do.
func (tb *Testbed) client(cluster string) (kubernetes.Interface, error) {
	tb.mu.Lock()
	defer tb.mu.Unlock()
	if c, ok := tb.clients[cluster]; ok {
		return c, nil
	}
	config, err := tb.Lab.RESTConfig(cluster)
	if err != nil {
		return nil, err
	}
	c, err := kubernetes.NewForConfig(config)
	if err != nil {
		return nil, fmt.Errorf("make a client of %s: %w", cluster, err)
	}
	tb.clients[cluster] = c
	return c, nil
}

// execs numbers the calls of ExecCommand: containerd wants a name for each.
var execs atomic.Uint64

// KillAgent sends SIGKILL to the agent of a node and keeps it down: the node's kubelet is stopped first,
// so that it is not restarted. ReviveAgent undoes it.
func (tb *Testbed) KillAgent(ctx context.Context, member, node string) error {
	agent, err := tb.agent(ctx, member, node)
	if err != nil {
		return err
	}
	id := containerID(agent)
	if err := tb.Lab.Stop(ctx, node, "kubelet"); err != nil {
		return fmt.Errorf("stop the kubelet of %s: %w", node, err)
	}
	if _, err := tb.containerd(ctx, node, "task", "kill", "--signal", "SIGKILL", id); err != nil {
		return fmt.Errorf("kill the agent of %s: %w", node, err)
	}
	return Eventually(ctx, 10*time.Second, func(ctx context.Context) error {
		tasks, err := tb.containerd(ctx, node, "task", "ls")
		if err != nil {
			return err
		}
		for line := range strings.Lines(tasks) {
			if strings.HasPrefix(line, id) && strings.Contains(line, "RUNNING") {
				return fmt.Errorf("the agent of %s still runs: %s", node, strings.TrimSpace(line))
			}
		}
		return nil
	})
}

// ReviveAgent starts the kubelet of a node again and waits until a new agent there is ready.
func (tb *Testbed) ReviveAgent(ctx context.Context, member, node string) error {
	if err := tb.Lab.Start(ctx, node, "kubelet"); err != nil {
		return fmt.Errorf("start the kubelet of %s: %w", node, err)
	}
	return Eventually(ctx, 3*time.Minute, func(ctx context.Context) error {
		said, err := tb.AgentStatus(ctx, member, node)
		if err != nil {
			return err
		}
		if !said.Ready {
			return fmt.Errorf("the agent of %s waits for: %s", node, strings.Join(said.Waiting, "; "))
		}
		return nil
	})
}

// AgentStatus is what the tests read of an agent's /status.
type AgentStatus struct {
	Ready     bool     `json:"ready"`
	Waiting   []string `json:"waiting"`
	Dataplane struct {
		Frontends int      `json:"frontends"`
		Backends  int      `json:"backends"`
		Writes    uint64   `json:"writes"`  // map writes since the agent started
		Drained   []string `json:"drained"` // members whose packets die
	} `json:"dataplane"`
}

// AgentStatus asks the agent of a node what it has to say about itself.
func (tb *Testbed) AgentStatus(ctx context.Context, member, node string) (AgentStatus, error) {
	agent, err := tb.agent(ctx, member, node)
	if err != nil {
		return AgentStatus{}, err
	}
	client, err := tb.client(member)
	if err != nil {
		return AgentStatus{}, err
	}
	// As isthmusctl does: the API server keeps our own credentials to itself.
	token, err := client.CoreV1().ServiceAccounts(Namespace).CreateToken(ctx, "isthmus-observer", &authenticationv1.TokenRequest{
		Spec: authenticationv1.TokenRequestSpec{Audiences: []string{"isthmus-agent"}},
	}, metav1.CreateOptions{})
	if err != nil {
		return AgentStatus{}, fmt.Errorf("ask the agent of %s: make a token: %w", node, err)
	}
	body, err := client.CoreV1().RESTClient().Get().Namespace(Namespace).Resource("pods").SubResource("proxy").Name("https:"+agent.Name+":9470").
		Suffix("status").SetHeader("Isthmus-Token", token.Status.Token).DoRaw(ctx)
	if err != nil {
		return AgentStatus{}, fmt.Errorf("ask the agent of %s: %w: %s", node, err, body)
	}
	var said AgentStatus
	if err := json.Unmarshal(body, &said); err != nil {
		return AgentStatus{}, fmt.Errorf("read the status of the agent of %s: %w", node, err)
	}
	return said, nil
}

// agent finds the only agent of a node.
func (tb *Testbed) agent(ctx context.Context, member, node string) (*corev1.Pod, error) {
	client, err := tb.client(member)
	if err != nil {
		return nil, err
	}
	pods, err := client.CoreV1().Pods(Namespace).List(ctx, metav1.ListOptions{
		LabelSelector: "app.kubernetes.io/name=isthmus-agent", FieldSelector: "spec.nodeName=" + node,
	})
	if err != nil {
		return nil, fmt.Errorf("find the agent of %s: %w", node, err)
	}
	if n := len(pods.Items); n != 1 {
		return nil, fmt.Errorf("want one agent pod on %s, found %d", node, n)
	}
	return &pods.Items[0], nil
}
