// SPDX-License-Identifier: Apache-2.0

package kube

import (
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"

	appsv1 "k8s.io/api/apps/v1"
	authenticationv1 "k8s.io/api/authentication/v1"
	authorizationv1 "k8s.io/api/authorization/v1"
	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
)

const (
	// AgentNamespace is the namespace of the agent: a value for POD_NAMESPACE.
	AgentNamespace = "istio-system"
	// AgentAccount is the name of its service account, its ClusterRole, the binding of both, and its DaemonSet.
	AgentAccount = "redirector"
	appLabel     = "app"
	// agentUser is what the API server calls it.
	agentUser = "system:serviceaccount:" + AgentNamespace + ":" + AgentAccount
)

// agentRules are the rights that the agent has in a cluster, and no more.
func agentRules() []rbacv1.PolicyRule {
	rule := func(group, resource string, verbs ...string) rbacv1.PolicyRule {
		return rbacv1.PolicyRule{APIGroups: []string{group}, Resources: []string{resource}, Verbs: verbs}
	}
	return []rbacv1.PolicyRule{
		rule("", "pods", "get", "list", "watch"),
		rule("", "namespaces", "get", "list", "watch"),
		rule("", "nodes", "get"),
		rule("", "pods/status", "patch"),
		rule("", "events", "create"),
		rule("apps", "daemonsets", "get"),
	}
}

// makeAgentAccount makes the agent's DaemonSet, of which no pod comes by itself here, its account with its rights, and the
// kubeconfig with a token for it.
func (c *Cluster) makeAgentAccount() {
	c.tb.Helper()
	ctx, named := c.tb.Context(), metav1.ObjectMeta{Name: AgentAccount}
	c.CreateNamespace(AgentNamespace, nil)
	accounts := c.Admin.CoreV1().ServiceAccounts(AgentNamespace)
	_, err := accounts.Create(ctx, &corev1.ServiceAccount{ObjectMeta: named}, create)
	if err != nil {
		c.tb.Fatal(err)
	}
	labels := map[string]string{appLabel: AgentAccount}
	_, err = c.Admin.AppsV1().DaemonSets(AgentNamespace).Create(ctx, &appsv1.DaemonSet{
		ObjectMeta: named,
		Spec: appsv1.DaemonSetSpec{
			Selector: &metav1.LabelSelector{MatchLabels: labels},
			Template: corev1.PodTemplateSpec{
				ObjectMeta: metav1.ObjectMeta{Labels: labels},
				Spec: corev1.PodSpec{
					ServiceAccountName: AgentAccount,
					Containers:         []corev1.Container{{Name: "agent", Image: "redirector"}},
				},
			},
		},
	}, create)
	if err != nil {
		c.tb.Fatal(err)
	}
	_, err = c.Admin.RbacV1().ClusterRoles().Create(ctx, &rbacv1.ClusterRole{ObjectMeta: named, Rules: agentRules()}, create)
	if err != nil {
		c.tb.Fatal(err)
	}
	_, err = c.Admin.RbacV1().ClusterRoleBindings().Create(ctx, &rbacv1.ClusterRoleBinding{
		ObjectMeta: named,
		RoleRef:    rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: "ClusterRole", Name: AgentAccount},
		Subjects:   []rbacv1.Subject{{Kind: rbacv1.ServiceAccountKind, Namespace: AgentNamespace, Name: AgentAccount}},
	}, create)
	if err != nil {
		c.tb.Fatal(err)
	}
	for _, r := range agentRules() {
		for _, verb := range r.Verbs {
			c.wantRight(verb, r.APIGroups[0], r.Resources[0], true)
		}
	}
	token, err := accounts.CreateToken(ctx, AgentAccount, &authenticationv1.TokenRequest{}, create)
	if err != nil {
		c.tb.Fatal(err)
	}
	if err := c.writeKubeconfig(token.Status.Token); err != nil {
		c.tb.Fatal(err)
	}
}

// DeleteDaemonSet removes the agent's DaemonSet, as an uninstallation does.
func (c *Cluster) DeleteDaemonSet() {
	c.tb.Helper()
	if err := c.Admin.AppsV1().DaemonSets(AgentNamespace).Delete(c.tb.Context(), AgentAccount, metav1.DeleteOptions{}); err != nil {
		c.tb.Fatal(err)
	}
}

// KeepDaemonSet has the agent's DaemonSet stay while it is being deleted, as when its pods are to go first.
func (c *Cluster) KeepDaemonSet() {
	c.tb.Helper()
	c.patchDaemonSet(`{"metadata":{"finalizers":["redirector.test/stays"]}}`)
}

// SelectNodes has the agent's DaemonSet want its pods on nodes that its pods' spec selects: JSON of nodeSelector, affinity.
func (c *Cluster) SelectNodes(spec string) {
	c.tb.Helper()
	c.patchDaemonSet(`{"spec":{"template":{"spec":` + spec + `}}}`)
}

func (c *Cluster) patchDaemonSet(patch string) {
	c.tb.Helper()
	sets := c.Admin.AppsV1().DaemonSets(AgentNamespace)
	if _, err := sets.Patch(c.tb.Context(), AgentAccount, types.MergePatchType, []byte(patch), metav1.PatchOptions{}); err != nil {
		c.tb.Fatal(err)
	}
}

// CreateNode makes the object of the node, which the kubelet makes elsewhere.
func (c *Cluster) CreateNode(labels map[string]string) {
	c.tb.Helper()
	node := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: NodeName, Labels: labels}}
	if _, err := c.Admin.CoreV1().Nodes().Create(c.tb.Context(), node, create); err != nil {
		c.tb.Fatal(err)
	}
}

// ForbidAll takes all rights from the agent, and returns when the API server goes by that. Allow gives them back.
func (c *Cluster) ForbidAll() {
	c.tb.Helper()
	c.setRules(nil)
	for _, r := range agentRules() {
		c.wantRight(r.Verbs[0], r.APIGroups[0], r.Resources[0], false)
	}
}

// DeleteAccount removes the agent's service account, and returns when the API server does not take its token any more, which it
// remembers for ten seconds.
func (c *Cluster) DeleteAccount() {
	c.tb.Helper()
	ctx := c.tb.Context()
	if err := c.Admin.CoreV1().ServiceAccounts(AgentNamespace).Delete(ctx, AgentAccount, metav1.DeleteOptions{}); err != nil {
		c.tb.Fatal(err)
	}
	token, err := os.ReadFile(c.path("token"))
	if err != nil {
		c.tb.Fatal(err)
	}
	c.eventually("the API server does not take the agent's token any more", func() error {
		review, err := c.Admin.AuthenticationV1().TokenReviews().Create(ctx, &authenticationv1.TokenReview{
			Spec: authenticationv1.TokenReviewSpec{Token: string(token)},
		}, create)
		if err == nil && review.Status.Authenticated {
			err = errors.New("it does")
		}
		return err
	})
}

// Forbid takes a right from the agent, and returns when the API server goes by that. The resource may have a subresource,
// "pods/status".
func (c *Cluster) Forbid(verb, resource string) {
	c.tb.Helper()
	rules := agentRules()
	for i := range rules {
		if rules[i].Resources[0] == resource {
			rules[i].Verbs = slices.DeleteFunc(rules[i].Verbs, func(v string) bool { return v == verb })
		}
	}
	c.setRules(rules)
	c.wantRight(verb, "", resource, false)
}

// Allow gives back what Forbid has taken.
func (c *Cluster) Allow() {
	c.tb.Helper()
	c.setRules(agentRules())
	for _, r := range agentRules() {
		for _, verb := range r.Verbs {
			c.wantRight(verb, r.APIGroups[0], r.Resources[0], true)
		}
	}
}

func (c *Cluster) setRules(rules []rbacv1.PolicyRule) {
	c.tb.Helper()
	rules = slices.DeleteFunc(rules, func(r rbacv1.PolicyRule) bool { return len(r.Verbs) == 0 })
	role, err := c.Admin.RbacV1().ClusterRoles().Get(c.tb.Context(), AgentAccount, get)
	if err != nil {
		c.tb.Fatal(err)
	}
	role.Rules = rules
	if _, err := c.Admin.RbacV1().ClusterRoles().Update(c.tb.Context(), role, update); err != nil {
		c.tb.Fatal(err)
	}
}

// wantRight waits until the API server's authorizer says that the agent has the right, or has it not.
func (c *Cluster) wantRight(verb, group, resource string, want bool) {
	c.tb.Helper()
	resource, subresource, _ := strings.Cut(resource, "/")
	c.eventually(fmt.Sprintf("the agent may %s %s: %t", verb, resource, want), func() error {
		review, err := c.Admin.AuthorizationV1().SubjectAccessReviews().Create(c.tb.Context(), &authorizationv1.SubjectAccessReview{
			Spec: authorizationv1.SubjectAccessReviewSpec{
				User: agentUser,
				ResourceAttributes: &authorizationv1.ResourceAttributes{
					Verb: verb, Group: group, Resource: resource, Subresource: subresource,
				},
			},
		}, create)
		if err != nil {
			return err
		}
		if review.Status.Allowed != want {
			return errors.New("the API server says otherwise")
		}
		return nil
	})
}
