{{- define "rekindle.image" -}}
{{ .Values.image.repository }}:{{ .Values.image.tag | default .Chart.AppVersion }}
{{- end }}

{{- define "rekindle.labels" -}}
app.kubernetes.io/part-of: rekindle
{{- end }}

{{- /* With several coordinators only the leader listens, so there is no one address. */}}
{{- define "rekindle.coordinators" -}}
{{- if .Values.etcd.enabled -}}
rekindle-coordinator-0.rekindle-coordinator-pods:7300,rekindle-coordinator-1.rekindle-coordinator-pods:7300,rekindle-coordinator-2.rekindle-coordinator-pods:7300
{{- else -}}
rekindle-coordinator:7300
{{- end }}
{{- end }}

{{- define "rekindle.etcdScheme" -}}
{{ .Values.etcdTls.enabled | ternary "https" "http" }}
{{- end }}

{{- /* A dict with `root`, `name` and what the certificate names. */}}
{{- define "rekindle.certificate" -}}
apiVersion: cert-manager.io/v1
kind: Certificate
metadata:
  name: {{ .name }}
  labels:
    {{- include "rekindle.labels" .root | nindent 4 }}
spec:
  secretName: {{ .name }}-tls
  duration: 2160h
  renewBefore: 720h
  {{- with .path }}
  uris: ["spiffe://{{ $.root.Values.certManager.trustDomain }}/rekindle/{{ . }}"]
  {{- end }}
  {{- with .names }}
  dnsNames:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with .addresses }}
  ipAddresses:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  usages: [digital signature, server auth, client auth]
  privateKey: {algorithm: ECDSA, size: 256, rotationPolicy: Always}
  issuerRef:
    {{- toYaml .root.Values.certManager.issuer | nindent 4 }}
{{- end }}

{{- /* It makes the Pods restart when the configuration changes. */}}
{{- define "rekindle.configChecksum" -}}
checksum/config: {{ cat .Values.config (include "rekindle.coordinators" .) | sha256sum }}
{{- end }}

{{- define "rekindle.tight" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities:
  drop: [ALL]
{{- end }}

{{- define "rekindle.small" -}}
requests: {cpu: 10m, memory: 16Mi}
limits: {memory: 64Mi}
{{- end }}

{{- define "rekindle.unprivileged" -}}
runAsNonRoot: true
runAsUser: 65532
runAsGroup: 65532
fsGroup: 65532
fsGroupChangePolicy: OnRootMismatch
seccompProfile:
  type: RuntimeDefault
{{- end }}

{{- define "rekindle.spread" -}}
- maxSkew: 1
  topologyKey: kubernetes.io/hostname
  whenUnsatisfiable: ScheduleAnyway
  labelSelector:
    matchLabels:
      app.kubernetes.io/name: {{ . }}
{{- end }}

{{- /* A dict with `root` and `port`. */}}
{{- define "rekindle.scraped" -}}
{{- if .root.Values.metrics.enabled }}
prometheus.io/scrape: "true"
prometheus.io/port: {{ .port | quote }}
{{- if .root.Values.metricsTls.enabled }}
prometheus.io/scheme: https
{{- end }}
{{- end }}
{{- end }}

{{- define "rekindle.scraper" -}}
- from:
    - namespaceSelector:
        matchLabels:
          kubernetes.io/metadata.name: {{ .root.Values.metrics.namespace }}
  ports:
    - {protocol: TCP, port: {{ .port }}}
{{- end }}
