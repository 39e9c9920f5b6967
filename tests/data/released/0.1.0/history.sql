BEGIN TRANSACTION;
CREATE TABLE records (
        seq INTEGER PRIMARY KEY, at REAL NOT NULL, kind TEXT NOT NULL, uid INTEGER, pid INTEGER, fields TEXT NOT NULL
    );
INSERT INTO "records" VALUES(1,1.79550113593354487414e+09,'policy.loaded',NULL,NULL,'{"digest":"1dd53eecb814","files":["/tmp/mpsbd35b80vt/s/policy.toml"]}');
INSERT INTO "records" VALUES(2,1.79550113619875502586e+09,'action',NULL,NULL,'{"action":"StartControl","reason":"no control daemon is running","rule":"promise 4: a fault, a hang or a crash ends by itself","enforce":true,"threads":10.0,"multiuser":false}');
INSERT INTO "records" VALUES(3,1.79550113657063555722e+09,'action.done',NULL,NULL,'{"action":"StartControl","begun":2,"ok":true,"text":"control daemon 22238 runs (started by this agent)","reason":"no control daemon is running","rule":"promise 4: a fault, a hang or a crash ends by itself","enforce":true,"threads":10.0,"multiuser":false}');
INSERT INTO "records" VALUES(4,1.79550113658562421805e+09,'action',NULL,NULL,'{"action":"Reconcile","reason":"compare with what the control daemon says","rule":"promise 4: a fault, a hang or a crash ends by itself","enforce":true,"servers":[]}');
INSERT INTO "records" VALUES(5,1.7955011366058270931e+09,'action.done',NULL,NULL,'{"action":"Reconcile","begun":4,"ok":true,"text":"","reason":"compare with what the control daemon says","rule":"promise 4: a fault, a hang or a crash ends by itself","enforce":true,"servers":[]}');
INSERT INTO "records" VALUES(6,1.79550113684904837606e+09,'gate.connected',NULL,22217,'{}');
INSERT INTO "records" VALUES(7,1.79550113685805773737e+09,'action',NULL,NULL,'{"action":"Reconcile","reason":"confirm what a log says: servers of control daemon 22238","rule":"what a log says is confirmed before anything rests on it","enforce":true,"servers":[]}');
INSERT INTO "records" VALUES(8,1.79550113686009240147e+09,'action.done',NULL,NULL,'{"action":"Reconcile","begun":7,"ok":true,"text":"","reason":"confirm what a log says: servers of control daemon 22238","rule":"what a log says is confirmed before anything rests on it","enforce":true,"servers":[]}');
INSERT INTO "records" VALUES(9,1.79550113859991025927e+09,'client.waiting',20001,22407,'{"connection":3057099246}');
INSERT INTO "records" VALUES(10,1.79550113860288286212e+09,'turn.began',20001,NULL,'{}');
INSERT INTO "records" VALUES(11,1795501138.62,'server.starting',20001,22418,'{}');
INSERT INTO "records" VALUES(12,1795501138.778,'server.ready',20001,22418,'{}');
INSERT INTO "records" VALUES(13,1.79550113880858612058e+09,'limits.verified',20001,NULL,'{"reason":"server 22418 started with 10 %, 2G","rule":"promise 1: every client gets exactly its policy","enforce":true,"server":22418}');
INSERT INTO "records" VALUES(14,1795501138.80849,'client.connected',20001,22407,'{"waited":0.20857977867126465,"limits":{"threads":10.0,"memory":{"0":2147483648}},"fail_safe":false,"handover":0.19198060035705566}');
INSERT INTO "records" VALUES(15,1.79550114031477713581e+09,'client.waiting',20002,22502,'{"connection":3058814113}');
INSERT INTO "records" VALUES(16,1.7955011404400961399e+09,'client.ended',20001,22407,'{"server":22418,"outcome":"ok","seconds":1.631606101989746,"waited":0.20857977867126465}');
INSERT INTO "records" VALUES(17,1.79550114045112061498e+09,'client.used',20001,22407,'{"seconds":1.632,"busy":0.0,"energy":164.3,"shared":false,"over":true}');
INSERT INTO "records" VALUES(18,1.79550114045237445836e+09,'turn.ended',20001,NULL,'{"seconds":1.8494915962219238,"forced":false}');
INSERT INTO "records" VALUES(19,1.79550114045357966418e+09,'action',NULL,NULL,'{"action":"ShutdownServer","reason":"the last client of server 22418 of user 20001 has gone and user 20002 waits","rule":"promise 2: the GPU is never idle while a user waits","enforce":true,"server":22418,"force":false}');
INSERT INTO "records" VALUES(20,1.79550114045542049409e+09,'action.done',NULL,NULL,'{"action":"ShutdownServer","begun":19,"ok":true,"text":"","reason":"the last client of server 22418 of user 20001 has gone and user 20002 waits","rule":"promise 2: the GPU is never idle while a user waits","enforce":true,"server":22418,"force":false}');
INSERT INTO "records" VALUES(21,1795501140.529,'server.ended',20001,22418,'{"status":0}');
INSERT INTO "records" VALUES(22,1.7955011405298480988e+09,'turn.began',20002,NULL,'{"gap":0.07747364044189453}');
INSERT INTO "records" VALUES(23,1795501140.546,'server.starting',20002,22542,'{}');
INSERT INTO "records" VALUES(24,1795501140.698,'server.ready',20002,22542,'{}');
INSERT INTO "records" VALUES(25,1.79550114071875882145e+09,'limits.verified',20002,NULL,'{"reason":"server 22542 started with 10 %, 2G","rule":"promise 1: every client gets exactly its policy","enforce":true,"server":22542}');
INSERT INTO "records" VALUES(26,1.79550114071869587901e+09,'client.connected',20002,22502,'{"waited":0.4039187431335449,"limits":{"threads":10.0,"memory":{"0":2147483648}},"fail_safe":false,"handover":0.17700457572937012}');
INSERT INTO "records" VALUES(27,1.79550114211307954787e+09,'lease.given',20003,NULL,'{"number":1,"by":0,"until":1821421142.1130795,"job":"job-7"}');
INSERT INTO "records" VALUES(28,1.79550114213495564459e+09,'drain.ordered',NULL,NULL,'{"by":0,"timeout":25920000.0}');
INSERT INTO "records" VALUES(29,1795501142.1351,'drain.begun',NULL,NULL,'{"reason":"no new work is admitted; work goes on for 300d00h","rule":"drain","enforce":true}');
CREATE TABLE sessions (
        number INTEGER PRIMARY KEY, kind TEXT NOT NULL, instance TEXT, uid INTEGER, pid INTEGER NOT NULL,
        came REAL NOT NULL, passed REAL, ended REAL, outcome TEXT, why TEXT, job TEXT, more TEXT NOT NULL
    );
INSERT INTO "sessions" VALUES(9,'client',NULL,20001,22407,1.79550113859991025927e+09,1795501138.80849,1.7955011404400961399e+09,'ok',NULL,NULL,'{"limits":{"threads":10.0,"memory":{"0":2147483648}},"memory":144703488,"counted":1.632,"busy":0.0,"energy":164.3,"shared":false}');
INSERT INTO "sessions" VALUES(10,'turn',NULL,20001,0,1.79550113860288286212e+09,1.79550113860288286212e+09,1.79550114045237445836e+09,'left',NULL,NULL,'{"gap":null,"before":null}');
INSERT INTO "sessions" VALUES(15,'client',NULL,20002,22502,1.79550114031477713581e+09,1.79550114071869587901e+09,NULL,NULL,NULL,NULL,'{"limits":{"threads":10.0,"memory":{"0":2147483648}},"memory":144703488}');
INSERT INTO "sessions" VALUES(22,'turn',NULL,20002,0,1.7955011405298480988e+09,1.7955011405298480988e+09,NULL,NULL,NULL,NULL,'{"gap":0.07747364044189453,"before":20001}');
CREATE INDEX records_uid ON records (uid) WHERE uid IS NOT NULL;
CREATE INDEX records_pid ON records (pid) WHERE pid IS NOT NULL;
CREATE INDEX sessions_kind ON sessions (kind, uid, passed, ended);
CREATE INDEX sessions_open ON sessions (number) WHERE ended IS NULL;
COMMIT;
PRAGMA user_version=4;
