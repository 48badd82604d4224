package chart
import (_ "helm.sh/helm/v4/pkg/action"; _ "helm.sh/helm/v4/pkg/chart/loader"; _ "helm.sh/helm/v4/pkg/engine"; _ "helm.sh/helm/v4/pkg/chart/v2/lint"; _ "github.com/prometheus-operator/prometheus-operator/pkg/apis/monitoring/v1"; _ "sigs.k8s.io/yaml")
